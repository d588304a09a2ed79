"""Batches of SFT rows behind the interface of the orchestrator's, and what the orchestrator would do with reports."""

import time
from pathlib import Path

from prime_hpc.algorithms.packing import pack
from prime_hpc.cluster.files import write_json
from prime_hpc.cluster.role import Role
from prime_hpc.config.sft_rows import DATA, open_rows
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.observe.monitor import Monitor
from prime_hpc.trainer.distributed import World, gather
from prime_hpc.trainer.model import PolicyModel
from prime_hpc.trainer.probe import Probe
from prime_hpc.trainer.sft_data import Row, load_tokenizer, make_render, to_sample
from prime_hpc.trainer.sft_order import RowOrder
from prime_hpc.transport.messages import RankBatch, StepReport


class SFTSource:
    """Every rank makes the same batch and takes its part; rank 0 logs the reports."""

    def __init__(self, role: Role, world: World, policy: PolicyModel):
        self._role, self._world, self._policy = role, world, policy
        self._config, self._start = role.config, time.monotonic()
        model, sft = role.config.model, role.config.trainer.sft
        self._tokenizer = tokenizer = load_tokenizer(model)
        files = [open_rows(Path(file.path), DATA) for file in sft.data]
        held_out = sft.probe.prompts if sft.probe.every else 0
        if len(files[-1]) <= held_out:
            expected = f"fewer than the {len(files[-1])} rows of {sft.data[-1].path}"
            raise ConfigurationError([ConfigProblem("trainer.sft.probe.prompts", held_out, expected)])
        render = make_render(tokenizer, model.renderer, sft)
        rows = [[render(file[i]) for i in range(len(file))] for file in files]
        probed = rows[-1][len(rows[-1]) - held_out :]
        rows[-1] = rows[-1][: len(rows[-1]) - held_out]
        self._rows = [_trainable(role, of_file) for of_file in rows]
        shares = [file.share for file in sft.data]
        self._order = RowOrder([len(of_file) for of_file in self._rows], shares if all(shares) else None,
                               role.config.seed, sft.shuffle)  # fmt: skip
        self._probe = Probe(_trainable(role, probed), sft.probe, world, tokenizer.eos_token_id,
                            role.config.seed) if held_out else None  # fmt: skip
        self._monitor = Monitor(role) if world.first else None
        self._losses: list[float] = []
        self._exact_match: float | None = None
        self._closed: int | None = None
        """Last step whose report was logged and whose probe, where due, was made."""

    def receive(self, step: int, report: StepReport | None, checkpointed: int) -> RankBatch:
        """Batch `step`, or an empty last one once the probe has reached its mark."""
        config, probe = self._config.trainer, self._config.trainer.sft.probe
        self._close_step(step - 1, report, due=bool(probe.every) and (step - 1) % probe.every == 0)
        reached = None not in (probe.stop_at, self._exact_match) and self._exact_match >= probe.stop_at
        if reached or any(gather(self._world.first and self._role.draining)):
            return self._batch(step, [], [])
        samples = [to_sample(self._rows[draw.file][draw.row], str(draw), self._config.seq_len)
                   for draw in self._order.batch(step, config.sft.batch_size)]  # fmt: skip
        packed = pack(samples, self._world.dp_size, config.micro_batch_tokens or self._config.seq_len)
        return self._batch(step, packed[self._world.dp_rank], [sample.sample_id for sample in samples])

    def finish(self, step: int, report: StepReport | None, checkpointed: int) -> None:
        """Log the last step, write the summary and declare the run complete."""
        self._close_step(step, report, due=bool(self._probe))
        if self._monitor:
            self._monitor.close()
            losses = self._losses or [None]
            write_json(self._role.paths.summary, {
                "steps": step, "loss_first": losses[0], "loss_last": losses[-1],
                "probe_exact_match": self._exact_match, "wall_s": time.monotonic() - self._start})  # fmt: skip
            self._role.mark_complete()

    def _close_step(self, step: int, report: StepReport | None, *, due: bool) -> None:
        """Probe where it is due and log the step; at the start, where nothing was trained, and again, do nothing."""
        if self._closed is None or step <= self._closed:
            self._closed = step
            return
        self._closed = step
        if due:
            self._exact_match = self._probe.exact_match(self._policy, step)
        if self._monitor:
            metrics = {**report.metrics, "probe/exact_match": self._exact_match} if due else report.metrics
            self._monitor.log(step, metrics)
            self._losses.append(report.metrics["loss"])
            progress = {"step": step, "of": self._config.max_steps, "loss": report.metrics["loss"]}
            if self._exact_match is not None:
                progress["exact_match"] = self._exact_match
            self._role.rendezvous.publish("training", progress=progress)
            if due:
                reply, reference = map(self._tokenizer.decode, self._probe.example)
                self._role.log.info("step %d | exact match on held-out rows %.3f | for example %r, wanted %r", step,
                                    self._exact_match, reply, reference)  # fmt: skip

    def _batch(self, step: int, micro_batches: list, sample_ids: list[str]) -> RankBatch:
        return RankBatch(step=step, rank=self._world.dp_rank, micro_batches=micro_batches, sample_ids=sample_ids,
                         journal_offset=0, last=not micro_batches)  # fmt: skip


def _trainable(role: Role, rows: list[Row]) -> list[Row]:
    """Rows with a token to train within `seq_len`; says how many are cut or left out."""
    limit = role.config.seq_len
    kept = [row for row in rows if row.mask[1:limit].any()]
    cut = sum(len(row.token_ids) > limit for row in kept)
    if cut or len(kept) < len(rows):
        role.log.warning("of %d rows, %d are cut to seq_len=%d and %d, without a token to train, are left out",
                         len(rows), cut, limit, len(rows) - len(kept))  # fmt: skip
    if not kept:
        expected = f"rows with a message to train (trainer.sft.roles) within seq_len = {limit}"
        raise ConfigurationError([ConfigProblem(DATA, [file.path for file in role.config.trainer.sft.data], expected)])
    return kept
