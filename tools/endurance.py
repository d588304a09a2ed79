"""What a run promises whatever happens to it, read from the files that it leaves."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from prime_hpc.orchestrator.journal import TRAINED, BatchCut, read, replay
from prime_hpc.plan.run_plan import read_forks
from prime_hpc.transport.weights import published_versions

UNCHANGED = (
    "launcher=local", "seq_len=64", "orchestrator.batch_size=16", "orchestrator.group_size=4", "trainer.threads=1",
    "optimizer.warmup_steps=0", "update.keep_versions=100000", "recovery.backoff_s=0.1", "recovery.backoff_max_s=0.2",
    *(f"recovery.{name}.max_restarts=1000" for name in ("trainer", "orchestrator", "inference", "environment")),
)  # fmt: skip
"""Settings of a run that is to be disturbed often: short, never out of restarts, and every weight version is kept."""


@dataclass(frozen=True)
class Account:
    """Figures of a run: groups by what became of them; rollouts that were lost on the way and run again; steps."""

    opened: int
    fates: dict[str, int]
    retried: int
    steps: int
    trained_again: int
    """Steps of weights that were abandoned for a checkpoint before them."""
    trained_twice: list[int]
    """Steps that the surviving weights hold twice, or not at all."""

    @property
    def lost(self) -> int:
        """Groups of which nobody can say what became of them."""
        return self.opened - sum(self.fates.values())

    def __str__(self) -> str:
        dropped = sum(self.fates.values()) - self.fates.get(TRAINED, 0)
        return (f"{self.opened} groups opened, {self.fates.get(TRAINED, 0)} trained, {dropped} dropped for a stated "
                f"reason, {self.lost} lost; {self.retried} rollouts lost on the way and run again; {self.steps} steps, "
                f"{self.trained_again} trained again from a checkpoint, {len(self.trained_twice)} twice in the weights "
                "that went on")  # fmt: skip


def account(root: Path, steps: int) -> Account:
    """The figures of the run at `root`, of one attempt, that was to make `steps` steps."""
    state, _ = replay(root / "rollouts" / "journal", steps)
    forks = read_forks(root / "forks.json")
    begin = {0: 0} | {fork.lineage: fork.step for fork in forks}
    trained = [v for v in published_versions(root / "weights") if v.step > begin[v.lineage]]
    kept = Counter(v.step for v in trained if all(v.step <= f.step for f in forks if f.lineage > v.lineage))
    logs = (root / "logs" / "attempt_1").glob("orchestrator-0*.log")
    lost = re.compile(r"WARNING orchestrator-0 rollout \S+: (?:inference|infrastructure) ")
    return Account(
        opened=sum(state.draws.values()),
        fates=state.fates,
        retried=sum(len(lost.findall(log.read_text(errors="replace"))) for log in logs),
        steps=state.step,
        trained_again=len(trained) - kept.total(),
        trained_twice=[step for step in range(1, steps + 1) if kept[step] != 1],
    )


def broken_promises(root: Path, steps: int) -> list[str]:
    """What the run at `root` that was to make `steps` steps did not keep, in words."""
    figures, wanted = account(root, steps), list(range(1, steps + 1))
    cut = [r.step for r, _ in read(root / "rollouts" / "journal") if isinstance(r, BatchCut)]
    rows = map(json.loads, (root / "metrics.jsonl").read_text().splitlines())
    reported = [row["step"] for row in rows if "loss" in row]
    return [
        *([f"batches {cut}, not up to {steps} once each"] if not cut or cut != wanted[-len(cut) :] else []),
        *([f"steps reported {reported}"] if reported != wanted else []),
        *([f"{figures.lost} groups are lost"] if figures.lost else []),
        *([f"steps {figures.trained_twice} trained not once"] if figures.trained_twice else []),
        *(f"{name} still runs as process {pid}" for name, pid in processes(root)),
    ]


def processes(root: Path) -> Iterator[tuple[str, int]]:
    """Name and id of every process of the run at `root`, told by the log that it writes to; its children included."""
    for process in psutil.process_iter():
        with suppress(OSError):
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
            if root / "logs" in log.parents:
                yield log.name.partition(".")[0], process.pid
