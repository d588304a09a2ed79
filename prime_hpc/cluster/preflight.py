"""Is a node fit for a run? One task on every node of a step:

    srun --ntasks-per-node=1 ... python -m prime_hpc.cluster.preflight FOLDER --gpus 8

Each says in one line what it found; the exit code is 1 where something is missing.
"""

import argparse
import contextlib
import importlib.util
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prime_hpc.cluster.files import list_fresh, write_json
from prime_hpc.cluster.gpus import count_gpus

POLL_S = 0.2
GIB = 2**30
HERE, MET = ".here", ".met"
"""Suffixes of the files of a node that is there, and of one that has seen all others."""


@dataclass(frozen=True)
class Wanted:
    """What every node must have: GPUs, importable modules, free space, and a folder that all `nodes` see."""

    folder: Path
    nodes: int
    gpus: int
    modules: list[str]
    free_gib: float
    timeout_s: float


def inspect_node(wanted: Wanted, step: str) -> tuple[str, list[str]]:
    """What this node has, in a sentence, and what it lacks. `step` names the step, so that no two mix their files."""
    if not wanted.folder.is_dir():
        return f"Python {platform.python_version()}", [f"no folder {wanted.folder}"]
    gpus, free = count_gpus(), shutil.disk_usage(wanted.folder).free / GIB
    seen, seconds = _meet(wanted.folder / f".preflight_{step}", wanted.nodes, wanted.timeout_s)
    lacks = [f"{gpus} of {wanted.gpus} GPUs"] if gpus < wanted.gpus else []
    lacks += [f"no module {name}" for name in wanted.modules if importlib.util.find_spec(name) is None]
    lacks += [f"{free:.0f} of {wanted.free_gib:.0f} GiB free in {wanted.folder}"] if free < wanted.free_gib else []
    lacks += [f"{seen} of {wanted.nodes} nodes write to the same {wanted.folder}"] if seen < wanted.nodes else []
    has = f"Python {platform.python_version()}, {gpus} GPUs, {free:.0f} GiB free, {seen} nodes met in {seconds:.1f} s"
    return has, lacks


def node_name() -> str:
    """The node's name, as Slurm has it where it runs this task."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _meet(folder: Path, nodes: int, timeout_s: float) -> tuple[int, float]:
    """Leave a file in `folder` and wait for those of the other nodes; how many there were, after how many seconds.

    Whoever sees that all have seen all removes the folder; one that gives up takes its own file back.
    """
    begin, mine = time.monotonic(), folder / f"{node_name()}{HERE}"
    write_json(mine, {"pid": os.getpid()})
    while (seen := _count(folder, HERE)) < nodes and time.monotonic() - begin < timeout_s:
        time.sleep(POLL_S)
    seconds = time.monotonic() - begin
    if seen < nodes:
        mine.unlink()
        with contextlib.suppress(OSError):  # others are still there
            folder.rmdir()
        return seen, seconds
    write_json(mine.with_suffix(MET), {"seconds": seconds})
    if _count(folder, MET) >= nodes:
        shutil.rmtree(folder, ignore_errors=True)
    return seen, seconds


def _count(folder: Path, suffix: str) -> int:
    return sum(name.endswith(suffix) and not name.startswith(".") for name in list_fresh(folder))


def parse_arguments(words: list[str], environment: Mapping[str, str]) -> Wanted:
    """What the command line asks for; the number of nodes is that of the step unless it is given."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where runs will lie")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that every node must have")
    parser.add_argument("--nodes", type=int, default=int(environment.get("SLURM_STEP_NUM_NODES", 1)))
    parser.add_argument("--module", action="append", default=[], help="a Python module that must be installed")
    parser.add_argument("--free-gib", type=float, default=1.0, help="space that FOLDER must have")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="how long nodes wait for each other's files")
    found = parser.parse_args(words)
    return Wanted(found.folder, found.nodes, found.gpus, found.module, found.free_gib, found.timeout_s)


def main() -> None:
    step = "_".join(os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    has, lacks = inspect_node(parse_arguments(sys.argv[1:], os.environ), step)
    print(f"{node_name()}: {has}: {'; '.join(lacks) or 'fit'}", flush=True)
    sys.exit(1 if lacks else 0)


if __name__ == "__main__":
    main()
