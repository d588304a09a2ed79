"""Hosts of a job in the place of the plan's nodes; a spare takes the place of one that is not fit, or was lost."""

import os
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prime_hpc.config.cluster import component
from prime_hpc.errors import NodesLost
from prime_hpc.launchers.slurm.allocation import Block, Job
from prime_hpc.launchers.slurm.containers import mounts, srun_options, wrap
from prime_hpc.launchers.slurm.queue import state
from prime_hpc.launchers.slurm.steps import gpu_option, step_environment
from prime_hpc.plan.build import interpreter
from prime_hpc.plan.run_plan import RunPlan
from prime_hpc.plan.units import Unit

CHECK_S = 120.0
"""A host whose check takes longer is not fit."""
AT_ONCE = 32
"""Checks that run at the same time, each with an srun of its own, so that a dead host spoils no other's."""


@dataclass
class _BlockHosts:
    """Hosts of a block by the node whose place they have, and those that wait for a place."""

    block: Block
    raw_id: str
    placed: dict[int, str]
    spares: list[str]


class Hosts:
    """The hosts of the job around this process. Without spare nodes they stand as Slurm counts them."""

    def __init__(self, plan: RunPlan, job: Job, say: Callable[[str], None]):
        self._plan, self._job, self._say = plan, job, say
        self._blocks = [_block_hosts(job, number) for number in range(len(job.blocks))]

    def of(self, unit: Unit) -> list[str]:
        """Hosts of a unit in order of its nodes; none where they need not be named."""
        if not self._job.outlives_nodes:
            return []
        number, nodes = self._place(unit)
        return [self._blocks[number].placed[node] for node in nodes]

    def settle(self, units: Sequence[Unit]) -> None:
        """Have spares take the place of hosts of `units` that are not fit.

        Raises:
            NodesLost: nodes of a unit are gone, or are not fit, and no spare is left.
        """
        places = sorted({(number, node) for number, nodes in map(self._place, units) for node in nodes})
        for number in sorted({number for number, _ in places}):
            _check_part(self._blocks[number])
        if not self._job.outlives_nodes:
            return
        with ThreadPoolExecutor(AT_ONCE) as pool:
            problems = list(pool.map(lambda place: self._problem(place[0], self._host(*place)), places))
        for (number, node), problem in zip(places, problems, strict=True):
            if problem:
                self._replace(number, node, problem)

    def _replace(self, number: int, node: int, problem: str) -> None:
        unfit, hosts = self._host(number, node), self._blocks[number]
        while hosts.spares:
            spare = hosts.spares.pop(0)
            if lacks := self._problem(number, spare):
                self._say(f"the spare node {spare} is not fit either: {lacks}")
                continue
            self._say(f"{spare} takes the place of {unfit}, which is not fit: {problem}")
            hosts.placed[node] = spare
            return
        raise NodesLost(f"{unfit} is not fit for {hosts.block.name} and no spare is left: {problem}; exclude it "
                        f"(cluster.directives.exclude={unfit}) or ask for more spare_nodes")  # fmt: skip

    def _host(self, number: int, node: int) -> str:
        return self._blocks[number].placed[node]

    def _problem(self, number: int, host: str) -> str | None:
        """What a host of a block lacks, None for a fit one."""
        try:
            done = subprocess.run(self._check(number, host), env=step_environment(os.environ), text=True,
                                  capture_output=True, timeout=CHECK_S)  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"no answer for {CHECK_S:.0f} s"
        # srun's own words only where the check has said nothing
        said = done.stdout.strip() or done.stderr.strip() or "no answer"
        return said.splitlines()[-1].strip() if done.returncode else None

    def _check(self, number: int, host: str) -> list[str]:
        """The srun command line that runs the preflight check on one host."""
        block, config = self._job.blocks[number], self._plan.typed_config()
        container = component(config.cluster, block.name).container
        inside = mounts(self._plan.run_dir, config.model.path, container)
        check = [interpreter(config, block.name), "-m", "prime_hpc.cluster.preflight", self._plan.run_dir,
                 f"--gpus={block.gpus}", "--nodes=1", "--quick"]  # fmt: skip
        group = [f"--het-group={number}"] if len(self._job.blocks) > 1 else []
        return ["srun", *group, f"--nodelist={host}", "--nodes=1", "--ntasks=1", "--overlap", "--overcommit",
                *gpu_option(block.gpus, block.resources.gres), "--mpi=none", "--input=none", "--job-name=preflight",
                *srun_options(container, inside), *wrap(container, inside, check, gpus=block.gpus > 0)]  # fmt: skip

    def _place(self, unit: Unit) -> tuple[int, range]:
        """The block in which a unit lies, and its nodes there."""
        number = self._job.block_number(unit.group)
        first = self._job.blocks[number].number(unit.group) + unit.first_node
        return number, range(first, first + unit.nodes)


def _block_hosts(job: Job, number: int) -> _BlockHosts:
    suffix = f"_HET_GROUP_{number}" if len(job.blocks) > 1 else ""
    block, listed = job.blocks[number], os.environ[f"SLURM_JOB_NODELIST{suffix}"]
    shown = subprocess.run(["scontrol", "show", "hostnames", listed], capture_output=True, text=True, check=True)
    names = shown.stdout.split()
    needed = {block.number(group) + node for group in block.groups for node in range(group.nodes)}
    return _BlockHosts(block, os.environ[f"SLURM_JOB_ID{suffix}"], {node: names[node] for node in sorted(needed)},
                       [name for node, name in enumerate(names) if node not in needed])  # fmt: skip


def _check_part(hosts: _BlockHosts) -> None:
    """Part of a heterogeneous job may be cancelled alone. No answer of the controller says nothing about the nodes."""
    now = state(hosts.raw_id)
    if now not in (None, "RUNNING"):
        raise NodesLost(f"the nodes of {hosts.block.name} are gone: their part of the job is {now}")
