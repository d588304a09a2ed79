"""Run directories as runs leave them, made file by file."""

import json
import os
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from prime_hpc.cluster.memory import HostMemory
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import to_dict
from prime_hpc.observe.doctor import Diagnosis, diagnose
from prime_hpc.observe.run_facts import RunFacts, read_run
from prime_hpc.plan.run_plan import ProcessPlan, RunPlan
from prime_hpc.transport.checkpoints import CheckpointManifest, partial_path, publish

START = 1_795_000_000.0
"""When attempt 1 began; other times of a test are seconds after it."""
PROCESSES = {"orchestrator-0": "orchestrator", "env-words-0": "environment", "inference-0": "inference",
             "trainer-0": "trainer", "trainer-1": "trainer"}  # fmt: skip
HOST = "node7"
Wait = tuple[str, str, float, float]


class RunDir:
    """A run of five processes in `root`, at first with the plan of attempt 1 and an empty log of each process."""

    def __init__(self, root: Path, attempt: int = 1):
        self.paths, self.attempt = RunPaths(root), attempt
        self.processes = [ProcessPlan(name=name, component=component, index=int(name[-1]), node=0, command=[], log="")
                          for name, component in PROCESSES.items()]  # fmt: skip
        root.mkdir(exist_ok=True)
        self.configure()
        for name in PROCESSES:
            self.log(name, "", at=0)

    def configure(self, **values: Any) -> None:
        """A plan with these values of its configuration."""
        root, config = self.paths.root, replace(RunConfig(), max_steps=90, **values)
        plan = RunPlan(name=root.name, run_dir=str(root), attempt=self.attempt, nodes=1, forks=[], checkpoint=None,
                       processes=self.processes, config=to_dict(config))  # fmt: skip
        self.paths.plan.write_bytes(plan.dump())

    def log(self, process: str, text: str, *, at: float, restart: int = 0) -> Path:
        """The log of a process, last written `at`; `<S>` stands for the clock S seconds after the start."""
        name = f"{process}.restart_{restart}.log" if restart else f"{process}.log"
        path = self.paths.logs(self.attempt) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(clocks(text))
        os.utime(path, (START + at, START + at))
        return path

    def record(self, process: str, state: str, *, at: float, **facts: Any) -> None:
        value = {"process": process, "attempt": self.attempt, "state": state, "host": HOST, "time": START + at, **facts}
        self._write(self.paths.rendezvous / f"{process}.json", value)

    def failed(self, process: str, error: str, *, at: float, log: str | None = None) -> None:
        """A process that published its error and ended with code 1, as `cluster.role.main` does."""
        traceback = f'Traceback (most recent call last):\n  File "x.py", line 1, in f\n{error}\n'
        self.log(process, log or f"{traceback}<{at}> ERROR   {process} {error}\n", at=at)
        self.record(process, "failed", at=at, error=error)
        self.event("exit", at=at + 0.3, process=process, exit_code=1)

    def event(self, kind: str, *, at: float, **facts: Any) -> None:
        process = facts.get("process")
        unit = facts.pop("unit", process and ("trainer" if process.startswith("trainer") else process))
        event = {"time": START + at, "attempt": self.attempt, "kind": kind, "unit": unit, "process": None,
                 "exit_code": None, "reason": "", "restart": 0, **facts}  # fmt: skip
        with (self.paths.root / "events.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")

    def beat(self, process: str, *, at: float, doing: str = "", wait: Wait | None = None) -> None:
        """`wait` is (what, owner, seconds after the start, deadline in seconds)."""
        waiting = wait and {"what": wait[0], "owner": wait[1], "since": START + wait[2], "deadline_s": wait[3]}
        value = {"process": process, "attempt": self.attempt, "restart": 0, "pid": 1, "host": HOST, "time": START + at,
                 "doing": doing, "wait": waiting}  # fmt: skip
        self._write(self.paths.rendezvous / "beats" / f"{process}.json", value)

    def lease(self, *, at: float) -> None:
        self._write(self.paths.rendezvous / "lease.json", {"attempt": self.attempt, "beat": START + at})

    def step(self, step: int, *, at: float, **metrics: float) -> None:
        with self.paths.metrics.open("a") as file:
            file.write(json.dumps({"step": step, "time": START + at, "loss": 0.5, **metrics}) + "\n")

    def checkpoint(self, step: int) -> None:
        partial = partial_path(self.paths.checkpoints, step)
        partial.mkdir(parents=True)
        publish(partial, CheckpointManifest(step=step, lineage=0, world=2, journal_offset=0, files={}, config={}))

    def facts(self, *, now: float, attempt: int | None = None, oom_kills: int | None = None) -> RunFacts:
        """What there is to read `now`, on a machine of 64 GiB that is the host of every process."""
        facts = read_run(self.paths.root, attempt)
        return replace(facts, now=START + now, host=HostMemory(HOST, 64 * 2**30, oom_kills))

    def diagnose(self, *, now: float, attempt: int | None = None, oom_kills: int | None = None) -> Diagnosis:
        return diagnose(self.facts(now=now, attempt=attempt, oom_kills=oom_kills))

    def _write(self, path: Path, value: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))


def clocks(text: str) -> str:
    """`text` with `<S>` replaced by a clock; `<iso:S>` gives the date too."""

    def clock(match: re.Match[str]) -> str:
        moment = datetime.fromtimestamp(START + float(match[2]))
        return f"{moment:%Y-%m-%dT%H:%M:%S}" if match[1] else f"{moment:%H:%M:%S}"

    return re.sub(r"<(iso:)?(-?[\d.]+)>", clock, text)
