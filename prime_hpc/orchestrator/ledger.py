"""What the orchestrator writes down: metrics, rollout records, progress, idle shares, the summary and the curve."""

import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import islice
from types import MappingProxyType

from rich.console import Console

from prime_hpc.cluster.files import write_json
from prime_hpc.cluster.role import Role
from prime_hpc.observe.curve import draw_reward_curve
from prime_hpc.observe.evaluation import evaluated_sources
from prime_hpc.observe.monitor import Monitor, read_metrics
from prime_hpc.observe.preview import Preview
from prime_hpc.observe.records import BatchManifest, RolloutRecorder, evaluations, read_records, record_path
from prime_hpc.orchestrator.batches import Batch, BatchShelf
from prime_hpc.orchestrator.env_pool import EnvPool
from prime_hpc.orchestrator.evals import Evaluation
from prime_hpc.orchestrator.fleet import UpdateTimes
from prime_hpc.orchestrator.report import Metrics, batch_metrics, losses, summarise
from prime_hpc.orchestrator.runner import Runner
from prime_hpc.orchestrator.scheduler import Scheduler
from prime_hpc.orchestrator.versions import Versions
from prime_hpc.transport.messages import BatchRequest, PolicyVersion, RankBatch, StepReport

TICK_S = 0.5
SINCE_LAST_STEP = "time/since_last_step"
"""Every row that comes from a report has this."""
SHOWN_ROLLOUTS = 3
NOTHING: Mapping[str, list[float]] = MappingProxyType({})


class Ledger:
    """One row a step: what the batch was, what the trainer measured, what the update cost."""

    def __init__(self, role: Role, start_step: int):
        self._role = role
        self._monitor = Monitor(role)
        records, rollouts = role.config.monitor.rollouts, role.paths.rollouts
        self._recorder = RolloutRecorder(role, rollouts) if records else None
        self._begin = time.monotonic()
        self._rows: dict[int, Metrics] = defaultdict(dict)
        rows = read_metrics(role.paths.metrics)
        self.last_evaluated = {source: step for step, row in rows.items() for source in evaluated_sources(row)}
        """By source, the last step with figures of an evaluation."""
        self._reported = max((step for step, row in rows.items() if SINCE_LAST_STEP in row), default=start_step)
        self._changed = asyncio.Condition()
        self._progress: dict[str, float | int] = {}
        self._update: Metrics = {}
        self._ticks = self._idle_ticks = self._reports = 0
        self._trainer_idle_s = self._trainer_s = 0.0
        self._last_report = self._begin
        self._last_tokens = self._tokens = 0

    async def shipped(self, batch: Batch, lineage: int, given_up: Mapping[str, list[float]] = NOTHING) -> None:
        """Batch `step` was cut for `lineage`. `given_up` are rollouts that came to nothing: seconds by reason.

        The first batch of a run is shown, decoded, in the log.
        """
        self._rows[batch.step].update(batch_metrics(batch) | losses(given_up))
        self._tokens += sum(done.rollout.completion_tokens for done in batch.rollouts)
        if self._recorder:
            trained = {sample.sample_id: sample for sample in batch.samples}
            for done in batch.rollouts:
                self._recorder.add(batch.step, done, trained)
            manifest = BatchManifest(step=batch.step, lineage=lineage, journal_offset=batch.journal_offset, lr=batch.lr,
                                     sample_ids=[sample.sample_id for sample in batch.samples])  # fmt: skip
            await asyncio.to_thread(self._recorder.flush, batch.step, manifest)
            if batch.step == 1 and (preview := Preview.of(self._role.config.model)):
                await asyncio.to_thread(self._show, preview, batch.step)

    def _show(self, preview: Preview, step: int) -> None:
        """Print a few samples of a recorded batch, so that a mistake in template or mask meets the eye at once."""
        console = Console(file=sys.stderr, force_terminal=True, highlight=False)
        console.print("what trains in the first batch:", preview.legend())
        for record in islice(read_records(record_path(self._role.paths.rollouts, step)), SHOWN_ROLLOUTS):
            for text in preview.render(record):
                console.print(text, soft_wrap=True)

    def updated(self, version: PolicyVersion, times: UpdateTimes) -> None:
        """The engines serve `version`; its costs go into the next row, as step `version` may be reported already."""
        self._update = {"update/version": float(version.step), "update/prepare_s": times.prepare_s,
                        "update/load_s": times.load_s, "update/pause_s": times.pause_s}  # fmt: skip
        if times.canary is not None:
            self._update |= {"update/canary": times.canary, "update/canary_s": times.canary_s}

    def note(self, step: int, metrics: Metrics) -> None:
        """More about batch `step`, whose row is not written yet."""
        self._rows[step].update(metrics)

    async def evaluated(self, evaluation: Evaluation) -> None:
        """Write down an evaluation, and show the reward at once, since after the last nobody looks."""
        step, source = evaluation.step, evaluation.source
        if self._recorder:
            recorder = RolloutRecorder(self._role, evaluations(self._role.paths.rollouts, source))
            for done in evaluation.rollouts:
                recorder.add(step, done)
            await asyncio.to_thread(recorder.flush, step)
        self._monitor.log(step, evaluation.metrics)
        reward = evaluation.metrics.get(f"eval/{source}/reward")
        self._progress.update(evaluated=step, **({} if reward is None else {f"eval_{source}": reward}))
        self._role.rendezvous.publish("sampling", progress=self._progress)

    async def answer(self, shelf: BatchShelf, request: BatchRequest) -> RankBatch:
        """The shelf's answer, after the report that came with the question was taken down."""
        if request.report:
            await self.report(request.report)
        return await shelf.answer(request)

    async def wait_reported(self, step: int) -> None:
        """Return once the trainer has reported step `step` (its last comes after the final checkpoint)."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._reported >= step)

    async def report_progress(self, pool: EnvPool, scheduler: Scheduler, versions: Versions, runner: Runner) -> None:
        """Publish progress and sample idleness until cancelled."""
        while True:
            self._ticks += 1
            self._idle_ticks += pool.inflight == 0
            counts = {"ready": scheduler.ready_rollouts, "inflight": scheduler.inflight}
            self._progress.update(served=versions.served.step, **counts)
            self._role.rendezvous.publish("paused" if runner.paused else "sampling", progress=self._progress,
                                          paused=runner.paused or "")  # fmt: skip
            self._role.heart.progress(f"pausing, since {runner.paused}" if runner.paused
                                      else f"sampling, {scheduler.inflight} rollouts in flight")  # fmt: skip
            await asyncio.sleep(TICK_S)

    def close(self) -> None:
        """Flush, write the summary and draw the curve."""
        self._monitor.close()
        paths = self._role.paths
        rows = read_metrics(paths.metrics)
        write_json(paths.summary, summarise(rows, time.monotonic() - self._begin, self._idle()), durable=True)
        draw_reward_curve(paths.metrics, paths.root / "reward_curve.png", self._role.plan.name)

    async def report(self, report: StepReport) -> None:
        """Write the row of a step, with what the trainer measured, unless it is there already."""
        if report.step <= self._reported:
            return
        now = time.monotonic()
        row = {**self._rows.pop(report.step, {}), **report.metrics, **self._update}
        self._update = {}
        row[SINCE_LAST_STEP] = now - self._last_report
        row["perf/rollout_tokens_per_s"] = (self._tokens - self._last_tokens) / (now - self._last_report)
        row.update(self._idle())
        self._last_report, self._last_tokens = now, self._tokens
        if self._reports:  # the first step waited for engines and environments to start
            self._trainer_idle_s += report.metrics.get("time/wait_for_batch", 0.0)
            self._trainer_s += row[SINCE_LAST_STEP]
        self._reports += 1
        self._monitor.log(report.step, row)
        self._reported = report.step
        started = self._reports > 1  # before, a step took as long as the start of everything
        shown = {short: row[key] for short, key in _SHOWN.items() if key in row and (started or key != SINCE_LAST_STEP)}
        self._progress.update(step=report.step, of=self._role.config.max_steps, **shown)
        async with self._changed:
            self._changed.notify_all()

    def _idle(self) -> Metrics:
        return {
            "idle/inference": self._idle_ticks / max(self._ticks, 1),
            "idle/trainer": min(self._trainer_idle_s / self._trainer_s, 1.0) if self._trainer_s else 0.0,
        }


_SHOWN = {"reward": "train/all/reward", "loss": "loss", "mismatch": "mismatch/abs_mean", "staleness": "staleness/mean",
          "s_per_step": SINCE_LAST_STEP}  # fmt: skip
