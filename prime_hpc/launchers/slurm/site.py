"""What this cluster offers, by sinfo, against what a plan asks for; and when Slurm would start it, by sbatch."""

import copy
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

import msgspec

from prime_hpc.config.cluster import COMPONENTS
from prime_hpc.config.slurm_checks import mebibytes, parse_time
from prime_hpc.errors import ConfigProblem, nearest_name
from prime_hpc.launchers.slurm.allocation import Block, jobs
from prime_hpc.launchers.slurm.sbatch import render_scripts
from prime_hpc.plan.run_plan import RunPlan

SINFO = ["sinfo", "--noheader", "--format=%P|%l|%D|%c|%m|%G|%f"]
STARTS = re.compile(r"to start at (\S+)")
SHORTER = (2, 4)
"""By which a time limit is divided to see whether a shorter job would start sooner."""


@dataclass(frozen=True)
class Nodes:
    """Equal nodes of a partition: how many, and what each has. `memory` is in MiB."""

    count: int
    cpus: int
    memory: int
    gpus: int
    features: frozenset[str]


@dataclass(frozen=True)
class Partition:
    """A partition; `limit_s` is None where it has no time limit."""

    name: str
    default: bool
    limit_s: int | None
    nodes: list[Nodes]


@dataclass(frozen=True)
class Start:
    """When Slurm would start a job with this time limit; `refused` has its words where it would not take it.

    `partition` is where all of its nodes with GPUs (of a job without any, all its nodes) would come from, None for
    where the plan has them from.
    """

    job: str
    limit: str | None
    partition: str | None = None
    at: datetime | None = None
    refused: str = ""


def ask_partitions() -> list[Partition] | None:
    """The partitions of this cluster, None where there is no Slurm, or none that answers."""
    if shutil.which("sinfo") is None:
        return None
    answer = subprocess.run(SINFO, capture_output=True, text=True)
    return read_partitions(answer.stdout) if answer.returncode == 0 else None


def read_partitions(sinfo: str) -> list[Partition]:
    """Partitions from the output of `SINFO`, one line for each kind of node."""
    found: dict[str, Partition] = {}
    for line in sinfo.splitlines():
        name, limit, count, cpus, memory, gres, features = line.split("|")
        seconds = None if limit == "infinite" else parse_time(limit)
        partition = found.setdefault(name, Partition(name.rstrip("*"), name.endswith("*"), seconds, []))
        partition.nodes.append(Nodes(int(count), _least(cpus), _least(memory), _gpus(gres),
                                     frozenset(features.split(","))))  # fmt: skip
    return list(found.values())


def find_site_problems(plan: RunPlan, partitions: list[Partition]) -> list[ConfigProblem]:
    """What of a plan this cluster could never serve."""
    limit = plan.typed_config().cluster.time
    problems = [problem for job in jobs(plan) for block in job.blocks for problem in _block(block, partitions, limit)]
    return list(dict.fromkeys(problems))


def ask_starts(plan: RunPlan, partitions: list[Partition]) -> list[Start]:
    """When each job of the plan would start; of one that would have to wait, also what would start sooner: with a
    shorter time limit, or on another partition that has such nodes."""
    limit, elsewhere = plan.typed_config().cluster.time, _moved(plan, partitions)
    starts = []
    for name, script in render_scripts(plan).items():
        first = _test(name, script, limit)
        starts.append(first)
        if first.at and first.at > datetime.now():
            tried = [_test(name, script.replace(f"--time={limit}", f"--time={time}"), time) for time in _shorter(limit)]
            tried += [_test(name, scripts[name], limit, where) for where, scripts in elsewhere.items()]
            starts += [start for start in tried if start.at and start.at < first.at]
    return starts


def _shorter(limit: str | None) -> list[str]:
    """Minutes of the shorter time limits that are tried."""
    seconds = parse_time(limit) or 0 if limit else 0
    return [f"{seconds // part // 60}" for part in SHORTER if seconds // part >= 60]


def _moved(plan: RunPlan, partitions: list[Partition]) -> dict[str, dict[str, str]]:
    """The scripts of the plan by partition, for each that could serve its nodes with GPUs and does not yet."""
    blocks = [block for job in jobs(plan) for block in job.blocks]
    moving = {group.name for block in blocks for group in block.groups if block.gpus or not any(b.gpus for b in blocks)}
    found = {}
    for partition in partitions:
        config = copy.deepcopy(plan.config)
        for name in moving & set(COMPONENTS):
            config["cluster"]["components"][name]["partition"] = partition.name
        there = msgspec.structs.replace(plan, config=config)
        if jobs(there) != jobs(plan) and not find_site_problems(there, partitions):
            found[partition.name] = render_scripts(there)
    return found


def _test(job: str, script: str, limit: str | None, partition: str | None = None) -> Start:
    answer = subprocess.run(["sbatch", "--test-only"], input=script, capture_output=True, text=True)
    found = STARTS.search(answer.stderr)
    if found is None:
        return Start(job, limit, partition, refused=answer.stderr.strip())
    return Start(job, limit, partition, at=datetime.fromisoformat(found[1]))


def _block(block: Block, partitions: list[Partition], limit: str | None) -> Iterator[ConfigProblem]:
    key, asked = f"cluster.components.{block.name}", block.resources.partition
    names = asked.split(",") if asked else [p.name for p in partitions if p.default]
    known = sorted(p.name for p in partitions)
    for name in names:
        if name not in known:
            yield ConfigProblem(f"{key}.partition", name, f"one of {', '.join(known)}", nearest_name(name, known))
    offers = [p for p in partitions if p.name in names]
    if not offers:
        return
    longest = max(float("inf") if p.limit_s is None else p.limit_s for p in offers)
    if limit and (parse_time(limit) or 0) > longest:
        yield ConfigProblem("cluster.time", limit, f"at most {longest:.0f} s, the limit of {', '.join(names)}")
    yield from _nodes(block, key, ", ".join(names), [kind for p in offers for kind in p.nodes])


def _nodes(block: Block, key: str, where: str, kinds: list[Nodes]) -> Iterator[ConfigProblem]:
    """The first thing that too few nodes have."""
    own, most = block.resources, sum(kind.count for kind in kinds)
    if most < block.nodes:
        yield ConfigProblem(f"{key}.nodes", block.nodes, f"at most the {most} nodes of {where}")
        return
    wants = [("constraint", own.constraint, lambda kind: _has_feature(own.constraint, kind)),
             ("gpus_per_node", block.gpus, lambda kind: kind.gpus >= block.gpus),
             ("cpus", own.cpus, lambda kind: kind.cpus >= (own.cpus or 0)),
             ("memory", own.memory, lambda kind: kind.memory >= mebibytes(own.memory or "0"))]  # fmt: skip
    for name, value, fits in wants:
        kinds = [kind for kind in kinds if fits(kind)]
        count = sum(kind.count for kind in kinds)
        if count < block.nodes:
            yield ConfigProblem(f"{key}.{name}", value,
                                f"what {block.nodes} of the nodes of {where} have; {count or 'none'} do")  # fmt: skip
            return


def _has_feature(constraint: str | None, kind: Nodes) -> bool:
    """True for whatever is more than one word: only Slurm knows what that selects."""
    return constraint is None or not re.fullmatch(r"\w+", constraint) or constraint in kind.features


def _least(text: str) -> int:
    """Of `4`, or of `4+` where nodes differ."""
    return int(text.rstrip("+"))


def _gpus(gres: str) -> int:
    """GPUs in text such as `gpu:h200:8(S:0-1),nvme:1`."""
    counts = re.findall(r"(?:^|,)gpu(?::[^:,()]+)*?:(\d+)", gres)
    return sum(map(int, counts))
