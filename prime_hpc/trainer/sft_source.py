"""Batches of SFT rows behind the interface of the orchestrator's, and what the orchestrator would do with reports."""

import time

from prime_hpc.cluster.files import write_json
from prime_hpc.cluster.role import Role
from prime_hpc.config.sft_rows import DATA, VALIDATION_DATA, RowFile
from prime_hpc.config.trainer import SFTConfig
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.observe.monitor import Monitor, read_metrics
from prime_hpc.trainer.distributed import World, gather
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.trainer.probe import Probe
from prime_hpc.trainer.sft_batches import Packing, RowPacker, open_together
from prime_hpc.trainer.sft_data import Render, load_tokenizer, make_render
from prime_hpc.trainer.sft_order import Draw, RowOrder
from prime_hpc.trainer.validation import Validation
from prime_hpc.transport.messages import MicroBatch, RankBatch, StepReport

HELD_OUT = "trainer.sft.validation.rows"


class SFTSource:
    """Every rank takes its part of a batch, which follows from the step alone; rank 0 logs the reports."""

    def __init__(self, role: Role, world: World, policy: PolicyModel):
        self._role, self._world, self._policy = role, world, policy
        self._config, self._start = role.config, time.monotonic()
        sft = role.config.trainer.sft
        self._tokenizer = load_tokenizer(role.config.model)
        render = make_render(self._tokenizer, role.config.model, sft)
        files = open_together([file.path for file in sft.data], DATA, world)
        _check_held_out(sft, len(files[-1]))
        counts = [len(file) for file in files]
        counts[-1] -= sft.held_out
        shares = [file.share for file in sft.data]
        self._order = RowOrder(counts, shares if all(shares) else None, role.config.seed, sft.shuffle)
        self._packer = RowPacker(files, render, world, role.config)
        self._plans: dict[int, Packing] = {}
        """Of the step that comes, and of the one behind it."""
        self._probe = self._make_probe(files[-1], render) if sft.probe.every else None
        self._validation = self._make_validation(files[-1], render) if sft.validation.every else None
        self._monitor = Monitor(role) if world.first else None
        self._found: dict[str, float] = {}
        """The newest that probe and validation have found."""
        self._closed: int | None = None
        """Last step whose report was logged and whose probe and validation, where due, were made."""

    def receive(self, step: int, report: StepReport | None, checkpointed: int) -> RankBatch:
        """Batch `step`, or an empty last one once the probe has reached its mark.

        Raises:
            ConfigurationError: the first batch has nothing to train, or a row of the next cannot be rendered.
        """
        self._close_step(step - 1, report)
        if self._reached(self._found) or any(gather(self._world.first and self._role.draining)):
            return self._batch(step, [], [])
        plan = self._plan(step)
        batch = self._batch(step, self._packer.fill(plan), [str(draw) for draw in plan.draws])
        if step < self._config.max_steps:
            self._packer.render_ahead(self._plan(step + 1), self._draws(step + 2))
        return batch

    def finish(self, step: int, report: StepReport | None, checkpointed: int) -> None:
        """Log the last step, write the summary and declare the run complete."""
        self._close_step(step, report, last=True)
        self._packer.close()
        if self._monitor:
            self._monitor.close()
            self._summarize(step)
            self._role.mark_complete()

    def _summarize(self, step: int) -> None:
        """Write what came of the whole run, of the attempts before this one too; seconds are those of this one."""
        rows = read_metrics(self._role.paths.metrics).values()

        def series(name: str) -> list[float | None]:
            return [row[name] for row in rows if name in row] or [None]

        cut, left_out = (sum(filter(None, series(name))) for name in ("sft/cut", "sft/left_out"))
        if cut or left_out:
            told = "of the rows that came, %d were cut to seq_len=%d and %d left out, with no token to train"
            self._role.log.warning(told, cut, self._config.seq_len, left_out)
        losses = series("loss")
        write_json(self._role.paths.summary, {
            "steps": step, "loss_first": losses[0], "loss_last": losses[-1],
            "probe_exact_match": series("probe/exact_match")[-1], "validation_loss": series("val/loss")[-1],
            "validation_accuracy": series("val/accuracy")[-1], "wall_s": time.monotonic() - self._start})  # fmt: skip

    def _plan(self, step: int) -> Packing:
        """The rows of a step, among the ranks."""
        if step not in self._plans:
            self._plans = {n: plan for n, plan in self._plans.items() if n >= step - 2}
            self._plans[step] = self._packer.plan(self._draws(step))
        if step == 1 and self._plans[step].empty:
            expected = (f"rows with a message to train (trainer.sft.roles) within seq_len = {self._config.seq_len}: "
                        "the first batch has none")  # fmt: skip
            paths = [file.path for file in self._config.trainer.sft.data]
            raise ConfigurationError([ConfigProblem(DATA, paths, expected)])
        return self._plans[step]

    def _draws(self, step: int) -> list[Draw]:
        return self._order.batch(step, self._config.trainer.sft.batch_size)

    def _make_probe(self, file: RowFile, render: Render) -> Probe:
        config = self._config.trainer.sft.probe
        rows = [render(file[i]) for i in range(len(file) - config.prompts, len(file))]
        answered = [row for row in rows if row.mask[1 : self._config.seq_len].any()]
        if not answered:
            expected = f"rows with a message to train at the end of {self._config.trainer.sft.data[-1].path}"
            raise ConfigurationError([ConfigProblem("trainer.sft.probe.prompts", config.prompts, expected)])
        return Probe(answered, config, self._world, self._tokenizer.eos_token_id, self._config.seed)

    def _make_validation(self, file: RowFile, render: Render) -> Validation:
        """Of the files that are named, or of the rows at the end of the training data."""
        config = self._config.trainer.sft.validation
        if config.data:
            files = open_together([other.path for other in config.data], VALIDATION_DATA, self._world)
            draws = [Draw(0, i, row) for i, other in enumerate(files) for row in range(len(other))]
        else:
            files, draws = [file], [Draw(0, 0, row) for row in range(len(file) - config.rows, len(file))]
        made = Validation(RowPacker(files, render, self._world, self._config), draws, self._world)
        if made.empty:
            key, value = (VALIDATION_DATA, [f.path for f in config.data]) if config.data else (HELD_OUT, config.rows)
            raise ConfigurationError([ConfigProblem(key, value, "rows with a message to train within seq_len")])
        return made

    def _close_step(self, step: int, report: StepReport | None, *, last: bool = False) -> None:
        """Evaluate what is due and log the step; at the start, where nothing was trained, and again, do nothing."""
        if self._closed is None or step <= self._closed:
            self._closed = step
            return
        self._closed = step
        found = self._evaluate(step, last=last)
        self._found |= found
        if self._monitor:
            self._monitor.log(step, {**report.metrics, **self._row_metrics(step), **found})
            progress = {"step": step, "of": self._config.max_steps, "loss": report.metrics["loss"]}
            names = {"probe/exact_match": "exact_match", "val/loss": "val_loss"}
            progress |= {names[key]: value for key, value in self._found.items() if key in names}
            self._role.rendezvous.publish("training", progress=progress)

    def _evaluate(self, step: int, *, last: bool) -> dict[str, float]:
        """Metrics of the probe and of the validation where they are due, alike on all ranks."""
        sft, found = self._config.trainer.sft, {}
        if self._probe and (last or step % sft.probe.every == 0):
            found["probe/exact_match"] = self._probe.exact_match(self._policy, step)
            reply, reference = map(self._tokenizer.decode, self._probe.example)
            if self._monitor:
                self._role.log.info("step %d | exact match on held-out rows %.3f | for example %r, wanted %r", step,
                                    found["probe/exact_match"], reply, reference)  # fmt: skip
        last = last or self._reached(found)
        if self._validation and (last or step % sft.validation.every == 0):
            found |= self._validation.measure(self._policy)
            if self._monitor:
                self._role.log.info("step %d | validation loss %.4f | accuracy %.3f | %d tokens", step,
                                    found["val/loss"], found["val/accuracy"], found["val/tokens"])  # fmt: skip
        return found

    def _reached(self, found: dict[str, float]) -> bool:
        """Whether the probe has come to its mark."""
        stop_at = self._config.trainer.sft.probe.stop_at
        return stop_at is not None and found.get("probe/exact_match", -1.0) >= stop_at

    def _row_metrics(self, step: int) -> dict[str, float]:
        """Epochs that were trained, and what became of the rows of a step."""
        plan, size = self._plans[step], self._config.trainer.sft.batch_size
        return {"sft/epoch": step * size / self._order.epoch_rows, "sft/cut": plan.cut, "sft/left_out": plan.left_out}

    def _batch(self, step: int, micro_batches: list[MicroBatch], sample_ids: list[str]) -> RankBatch:
        return RankBatch(step=step, rank=self._world.dp_rank, micro_batches=micro_batches, sample_ids=sample_ids,
                         journal_offset=0, last=not micro_batches)  # fmt: skip


def _check_held_out(sft: SFTConfig, rows: int) -> None:
    """Refuse to hold out all `rows` of the last file."""
    if rows <= sft.held_out:
        key = HELD_OUT if sft.held_out == sft.validation.rows else "trainer.sft.probe.prompts"
        expected = f"fewer than the {rows} rows of {sft.data[-1].path}"
        raise ConfigurationError([ConfigProblem(key, sft.held_out, expected)])
