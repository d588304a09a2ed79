"""Are these nodes fit for a run? One task on every node of a step:

    srun --ntasks-per-node=1 ... python -m prime_hpc.cluster.preflight FOLDER --gpus 8

The first task prints what every node found as one table, and a verdict with the nodes to leave out; the exit code is 1
where something is missing.
"""

import argparse
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from prime_hpc.cluster.checks.cache import inspect_model
from prime_hpc.cluster.checks.fabric import Fabric, inspect_fabric
from prime_hpc.cluster.checks.filesystem import PROBE_BYTES, inspect_room, inspect_speed
from prime_hpc.cluster.checks.finding import Finding
from prime_hpc.cluster.checks.gpus import inspect_gpus
from prime_hpc.cluster.checks.meeting import Meeting, Report, node_name
from prime_hpc.cluster.checks.network import inspect_ports


@dataclass(frozen=True)
class Wanted:
    """What every node must have; see `--help`."""

    folder: Path
    nodes: int
    gpus: int
    modules: list[str]
    models: list[Path]
    ports: list[int]
    free_gib: float
    disk_gb_s: float
    fabric_gb_s: float | None
    trainer_nodes: int | None
    skew_s: float
    timeout_s: float
    probe_mib: int
    quick: bool


def inspect_node(wanted: Wanted, meeting: Meeting, node: int) -> list[Finding]:
    """Every check on this node, which is the `node`-th of the step, counted from 0."""
    if not wanted.folder.is_dir():
        return [Finding("shared folder", False, f"no folder {wanted.folder}")]
    findings = [*meeting.attend(wanted.skew_s), inspect_gpus(wanted.gpus, in_use=wanted.quick),
                _modules(wanted.modules), inspect_room(wanted.folder, wanted.free_gib)]  # fmt: skip
    if wanted.quick:
        return findings
    findings += [inspect_speed(wanted.folder, wanted.disk_gb_s, wanted.probe_mib * 2**20), inspect_ports(wanted.ports),
                 *map(inspect_model, wanted.models)]  # fmt: skip
    if wanted.fabric_gb_s is not None and meeting.agree(all(finding.fit for finding in findings)):
        fabric = Fabric(meeting.folder, wanted.nodes, wanted.gpus, wanted.trainer_nodes or wanted.nodes)
        findings.append(inspect_fabric(fabric, node, wanted.fabric_gb_s))
    return findings


def render(reports: list[Report]) -> Table:
    """A row a node, a column a check."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    checks = list(dict.fromkeys(finding.check for report in reports for finding in report.findings))
    for column in ("node", *checks):
        table.add_column(column, overflow="fold")
    for report in reports:
        found = {finding.check: finding for finding in report.findings}
        table.add_row(report.host, *(_cell(found.get(check)) for check in checks))
    return table


def verdict(reports: list[Report], nodes: int) -> str:
    """`fit`, or which nodes are not and why."""
    unfit = {r.host: [f"{f.check}: {f.words}" for f in r.findings if not f.fit] for r in reports}
    lines = [f"  {host}: {'; '.join(faults)}" for host, faults in unfit.items() if faults]
    if len(reports) < nodes:
        lines.append(f"  {nodes - len(reports)} nodes handed in no report")
    if not lines:
        return f"verdict: all {nodes} nodes are fit"
    bad = ",".join(host for host, faults in unfit.items() if faults)
    return "\n".join(["verdict: not fit" + (f"; leave out with --exclude={bad}" if bad else ""), *lines])


def _cell(finding: Finding | None) -> str:
    if finding is None:
        return "-"
    return finding.words if finding.fit else f"UNFIT {finding.words}"


def _modules(names: list[str]) -> Finding:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    words = f"no module {', '.join(missing)}" if missing else f"Python {platform.python_version()}"
    return Finding("packages", not missing, words)


def parse_arguments(words: list[str], environment: Mapping[str, str]) -> Wanted:
    """What the command line asks for; the number of nodes is that of the step unless it is given."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where runs will lie")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that every node must have")
    parser.add_argument("--nodes", type=int, default=int(environment.get("SLURM_STEP_NUM_NODES", 1)))
    parser.add_argument("--module", dest="modules", action="append", default=[],
                        help="a Python module that must be installed")  # fmt: skip
    parser.add_argument("--model", dest="models", action="append", type=Path, default=[],
                        help="a model that must be there as a whole")  # fmt: skip
    parser.add_argument("--port", dest="ports", action="append", type=int, default=[],
                        help="a port that must be free")  # fmt: skip
    parser.add_argument("--free-gib", type=float, default=1.0, help="space that FOLDER must have")
    parser.add_argument("--disk-gb-s", type=float, default=0.0, help="GB/s to and from FOLDER, for each node")
    parser.add_argument("--fabric-gb-s", type=float, help="GB/s between nodes; not measured when left out, nor where "
                        "a node is not fit")  # fmt: skip
    parser.add_argument("--trainer-nodes", type=int, help="so many, the last ones, are the trainer's: an all-reduce "
                        "among them, and from there to each of the others; all when left out")  # fmt: skip
    parser.add_argument("--skew-s", type=float, default=2.0, help="how far apart clocks may be")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="how long nodes wait for each other's files")
    parser.add_argument("--probe-mib", type=int, default=PROBE_BYTES // 2**20,
                        help="size of the file of the speed test")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="only what costs nothing, beside processes of a run")
    return Wanted(**vars(parser.parse_args(words)))


def main(words: list[str] | None = None) -> int:
    """Exit code of the command: of the first task for all nodes, of the others for their own."""
    wanted = parse_arguments(sys.argv[1:] if words is None else words, os.environ)
    step = "_".join(os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    node = int(os.environ.get("SLURM_NODEID", 0))
    meeting = Meeting(wanted.folder / f".preflight_{step}", wanted.nodes, wanted.timeout_s)
    findings = inspect_node(wanted, meeting, node)
    reports = [Report(node_name(), findings)]
    if wanted.folder.is_dir():
        meeting.report(findings)
        if node:
            return 0 if all(finding.fit for finding in findings) else 1
        reports = meeting.reports()
        meeting.end()
    Console(width=200, markup=False).print(render(reports))
    print(verdict(reports, wanted.nodes), flush=True)
    return 0 if len(reports) == wanted.nodes and all(f.fit for r in reports for f in r.findings) else 1


if __name__ == "__main__":
    sys.exit(main())
