"""One run in which every role fails at every point of its work, in three ways: `python -m tools.chaos --out FOLDER`.

It runs on an engine without a model. Each start of a role has one failure before it, so that a role is started as often
as it has cells; what the supervisor wrote down becomes a table. Exit code 1 where a promise was broken.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prime_hpc.cluster.faults import VARIABLE, Fault
from prime_hpc.models.tiny import make_tiny_model
from prime_hpc.observe.events import Event, read_events
from prime_hpc.orchestrator.journal import BatchCut, GroupOpened, GroupsDropped, read

POINTS = {
    "trainer-1": {"batch": ["before"], "step": ["before", "during", "after"], "update": ["before", "during", "after"],
                  "save": ["before", "after"], "shutdown": ["before", "during", "after"]},
    "orchestrator-0": {"sampling": ["before", "after"], "batch": ["before", "during", "after"],
                       "update": ["before", "during", "after"], "evaluation": ["before", "after"],
                       "shutdown": ["before", "during", "after"]},
    "inference-0": {"sampling": ["before", "during", "after"], "update": ["before", "during", "after"]},
    "env-reverse_text-0": {"sampling": ["before", "during", "after"]},
}  # fmt: skip
"""What each role passes by, in order; what comes at the end of a run comes last."""
ACTIONS = ("SIGKILL", "SIGSTOP", "raise")
UNITS = {"trainer-1": "trainer", "orchestrator-0": "orchestrator"}
HANG_S = 12
OVERRIDES = (
    "+experiment=reverse_text_cpu", "launcher=local", "seq_len=64", "orchestrator.batch_size=16",
    "orchestrator.group_size=4", "trainer.ranks=2", "trainer.threads=1", "env.workers=2", "inference.replicas=2",
    "inference.engine=tests.fake_engine", "inference.engine_args={skill0: 0.5, skill_per_version: 0, token_s: 0.02}",
    "checkpoint.every=2", "recovery.backoff_s=0.1", "recovery.backoff_max_s=0.2", f"recovery.hang_s={HANG_S}",
    *(f"recovery.{name}.max_restarts=1000" for name in ("trainer", "orchestrator", "inference", "environment")),
    "env.eval.every=1", "env.eval.sources=[{id: prime_hpc.envs.reverse_text, name: held_out, args: {seed: 9}, "
    "num_tasks: 2, sampling: {max_tokens: 14}}]",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of one cell; `seconds` from the failure until the unit was back at work."""

    process: str
    point: str
    action: str
    result: str
    seconds: float | None


def make_faults() -> list[Fault]:
    """One fault for each start of each role. What raises inside an episode or a request fails that alone, not the role,
    and so shares a start with the next fault."""
    faults = []
    for process, phases in POINTS.items():
        restart = 0
        for point, action in _cells(phases):
            faults.append(Fault(process=process, point=point, action=action, restart=restart))
            restart += not _is_contained(process, point, action)
    return faults


def outcomes(events: list[Event], faults: list[Fault]) -> Iterator[Outcome]:
    """Each fault with what the supervisor did about it."""
    for fault in faults:
        unit = UNITS.get(fault.process, fault.process)
        mine = [e for e in events if e.unit == unit]
        if _is_contained(fault.process, fault.point, fault.action):
            yield Outcome(fault.process, fault.point, fault.action, "contained", None)
            continue
        failed = next((e for e in mine if e.kind in ("exit", "hang") and e.restart == fault.restart), None)
        back = next((e for e in mine if e.kind == "recovered" and e.restart == fault.restart + 1), None)
        if failed is None:
            result = "not reached"
        else:
            result = "recovered" if back else "at the end of the run"
        yield Outcome(fault.process, fault.point, fault.action, result, back.time - failed.time if back else None)


def render(rows: list[Outcome]) -> str:
    """A Markdown table: a row a point, a column a way to fail."""
    lines = ["| role | point | killed | suspended | exception |", "| --- | --- | --- | --- | --- |"]
    cells = {(o.process, o.point, o.action): o for o in rows}
    for process, point in dict.fromkeys((o.process, o.point) for o in rows):
        shown = [_show(cells[process, point, action]) for action in ACTIONS]
        lines.append(f"| {process.rpartition('-')[0].split('-')[0]} | {point} | {' | '.join(shown)} |")
    return "\n".join(lines)


def check(root: Path, steps: int) -> list[str]:
    """Promises of the run at `root` that were broken."""
    fates: dict[str, int] = {}
    cut = []
    for record, _ in read(root / "rollouts" / "journal"):
        match record:
            case GroupOpened():
                fates[record.group_id] = 0
            case BatchCut():
                cut.append(record.step)
                fates.update({group: fates[group] + 1 for group in record.group_ids})
            case GroupsDropped():
                fates.update({group: fates[group] + 1 for group in record.group_ids})
    rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    trained = [row["step"] for row in rows if "loss" in row]
    return [
        *([f"batches {cut}, not 1 to {steps} once each"] if cut != list(range(1, steps + 1)) else []),
        *([f"steps reported {trained}"] if trained != list(range(1, steps + 1)) else []),
        *(f"group {group} has {count} fates" for group, count in fates.items() if count != 1),
    ]


def run(out: Path, steps: int) -> tuple[int, list[Outcome], Path]:
    """The exit code of the run, a row for each cell, and where the run lies."""
    faults, root = make_faults(), out / "chaos"
    make_tiny_model(out / "model", seed=0, hidden_size=32, layers=2)
    environment = {**os.environ, VARIABLE: msgspec.json.encode(faults).decode()}
    command = [sys.executable, "-m", "prime_hpc.launch", *OVERRIDES, f"max_steps={steps}", "run.name=chaos",
               f"model.path={out / 'model'}", f"run.output_dir={out}"]  # fmt: skip
    code = subprocess.run(command, env=environment).returncode
    return code, list(outcomes(read_events(root, 1), faults)), root


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    code, rows, root = run(arguments.out.absolute(), arguments.steps)
    broken = check(root, arguments.steps)
    print(render(rows))
    print(*broken, sep="\n")
    sys.exit(1 if code or broken else 0)


def _cells(phases: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    for phase, moments in phases.items():
        for moment in moments:
            for action in ACTIONS:
                yield f"{phase}.{moment}", action


def _is_contained(process: str, point: str, action: str) -> bool:
    """Whether an exception there fails one episode or one request, and is tried again without any restart."""
    return action == "raise" and process.startswith(("env-", "inference-")) and point.startswith("sampling")


def _show(outcome: Outcome) -> str:
    return outcome.result if outcome.seconds is None else f"{outcome.seconds:.0f} s"


if __name__ == "__main__":
    main()
