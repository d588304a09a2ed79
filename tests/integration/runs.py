"""Whole runs on the fake engine, started as a user starts them."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from prime_hpc.cluster.faults import VARIABLE, Fault
from prime_hpc.orchestrator.journal import BatchCut, GroupOpened, GroupsDropped, read
from tests.warm import start_warm
from tools.endurance import processes
from tools.forked import Process

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = (
    "seq_len=64", "orchestrator.batch_size=16", "orchestrator.group_size=4", "trainer.ranks=1", "env.workers=1",
    "inference.engine=tests.fake_engine", "optimizer.warmup_steps=0", "trainer.threads=1", "launcher.stop_grace_s=3",
)  # fmt: skip


class RunDirectory:
    """What lies in the directory of a run."""

    def __init__(self, root: Path):
        self.root = root

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.root / "summary.json").read_text())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        path = self.root / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def record(self, process: str) -> dict[str, Any]:
        """What a process last published."""
        return json.loads((self.root / "rendezvous" / f"{process}.json").read_text())

    def log(self, process: str, attempt: int = 1) -> str:
        return (self.root / "logs" / f"attempt_{attempt}" / f"{process}.log").read_text()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.root / "events.jsonl").read_text().splitlines()]

    @property
    def reported(self) -> list[int]:
        """Steps in `metrics.jsonl`, as often as they are there."""
        return [row["step"] for row in self.metrics if "loss" in row]

    @property
    def cut(self) -> list[int]:
        """Steps whose batches were cut, by the journal."""
        return [r.step for r, _ in read(self.root / "rollouts" / "journal") if isinstance(r, BatchCut)]

    def ledger(self) -> dict[str, list[str]]:
        """Where every group that was ever opened went, by the journal: a batch, a reason for dropping it, or `open`."""
        fates: dict[str, list[str]] = {}
        for record, _ in read(self.root / "rollouts" / "journal"):
            match record:
                case GroupOpened():
                    fates[record.group_id] = []
                case BatchCut():
                    for group_id in record.group_ids:
                        fates[group_id].append(f"batch {record.step}")
                case GroupsDropped():
                    for group_id in record.group_ids:
                        fates[group_id].append(record.reason)
        return fates

    def survivors(self) -> list[tuple[str, int]]:
        """Processes that still work on this run, by name and id."""
        return list(processes(self.root))


class LocalRun(RunDirectory):
    """A run of `+experiment=reverse_text_cpu launcher=local`, or of another one, with a few overrides, started as a
    user starts it."""

    launcher = "prime_hpc.launch"

    def __init__(self, output_dir: Path, model: Path, name: str, *overrides: str, faults: Sequence[Fault] = (),
                 experiment: str = "reverse_text_cpu"):  # fmt: skip
        super().__init__(output_dir / name)
        env = {**os.environ, VARIABLE: msgspec.json.encode(faults).decode()}
        command = [sys.executable, "-m", self.launcher, f"+experiment={experiment}", "launcher=local", *TINY,
                   f"model.path={model}", f"run.output_dir={output_dir}", f"run.name={name}", *overrides]  # fmt: skip
        self._output = output_dir / f"{name}.{len(list(output_dir.glob(f'{name}.*')))}.out"
        self._output.touch()
        self.process = self._start(command, env)

    def _start(self, command: list[str], env: dict[str, str]) -> Process:
        with self._output.open("w") as output:
            return subprocess.Popen(command, cwd=REPOSITORY, env=env, stdout=output, stderr=output)

    def wait(self, timeout_s: float = 600) -> tuple[int, str]:
        """Exit code and output."""
        return self.process.wait(timeout_s), self._output.read_text()

    def wait_for_step(self, step: int) -> None:
        """Return once the run has reported step `step`; fails where it ends before."""
        while self.process.poll() is None:
            if any(int(found) >= step for found in re.findall(r"step (\d+)/", self._output.read_text())):
                return
            time.sleep(0.05)
        raise AssertionError(f"the run ended before step {step}: {self.log('orchestrator-0')[-3000:]}")


class ForkedRun(LocalRun):
    """A run whose processes, the launcher among them, are forked from one that has loaded the libraries."""

    launcher = "tools.forked"

    def _start(self, command: list[str], env: dict[str, str]) -> Process:
        return start_warm(command, env, self._output)


def launch_forked(output: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output of `python -m prime_hpc.launch ARGUMENTS`, whose processes are forked in that way, too."""
    command = [sys.executable, "-m", ForkedRun.launcher, *arguments]
    return start_warm(command, dict(os.environ), output).wait(600), output.read_text()
