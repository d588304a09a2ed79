"""Batch scripts: the text that Slurm is given for each job of a plan. Pure functions of the plan."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from prime_hpc.cluster.files import write_atomic
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.config.cluster import ClusterConfig
from prime_hpc.launchers.slurm.allocation import MAIN, Block, Job, jobs, script_name
from prime_hpc.launchers.slurm.steps import gpu_option
from prime_hpc.plan.build import host_python
from prime_hpc.plan.run_plan import RunPlan

SEPARATOR = "#SBATCH hetjob"
SIGNAL = "USR1"
"""Told to the batch script alone, before the time limit. Roles use USR2, and NCCL may catch USR1 in tasks."""


def render_scripts(plan: RunPlan) -> dict[str, str]:
    """The batch scripts of a plan by name of their file in the run directory, that of the main job first."""
    return {script_name(job): render_script(plan, job) for job in jobs(plan)}


def render_script(plan: RunPlan, job: Job) -> str:
    """The batch script of one job: it becomes the supervisor of the steps of the job."""
    config, paths = plan.typed_config(), RunPaths(Path(plan.run_dir))
    header = render_header(
        plan.name, job, config.cluster, str(paths.root / "logs" / "job_%j.log"), config.launcher.slot
    )
    command = [host_python(config), "-u", "-m", "prime_hpc.launchers.slurm.batch", str(paths.plan)]
    command += [] if job.name == MAIN else ["--job", job.name]
    return "\n".join(["#!/bin/bash", *header, "", "set -e", *config.cluster.setup, f"exec {shlex.join(command)}", ""])


def render_header(name: str, job: Job, cluster: ClusterConfig, output: str, slot: str | None = None) -> list[str]:
    """The #SBATCH lines of a job, block by block.

    Every block has a job name of its own: with a common one `--dependency=singleton` makes them wait for each other.
    In a `slot` those names are the slot's, by which jobs of different runs wait for each other.
    `--no-kill` counts for a heterogeneous job only if every block has it, and two nodes or more.
    """
    lines: list[str] = []
    prefix = slot or name if job.name == MAIN else f"{name}.{job.name}"
    for i, block in enumerate(job.blocks):
        options = [f"--job-name={prefix if i == 0 else f'{slot or name}.{block.name}'}", *_resources(block)]
        if job.outlives_nodes:
            options.append("--no-kill")
        if i == 0:
            options += _job_options(cluster, output)
        lines += [*([SEPARATOR] if i else []), *(f"#SBATCH {option}" for option in options), *_directives(block)]
    return lines


def write_scripts(plan: RunPlan) -> list[Path]:
    """Put the batch scripts into the run directory."""
    written = []
    for name, text in render_scripts(plan).items():
        written.append(Path(plan.run_dir) / name)
        write_atomic(written[-1], text.encode())
    return written


def _resources(block: Block) -> Iterator[str]:
    """One task a node stands for the whole node: steps say themselves how many they have."""
    resources = block.resources
    for option in ("account", "partition", "qos", "constraint"):
        value = getattr(resources, option)
        if value is not None:
            yield f"--{option}={shlex.quote(value)}"
    yield f"--nodes={block.nodes}"
    yield "--ntasks-per-node=1"
    if resources.cpus:
        yield f"--cpus-per-task={resources.cpus}"
    if resources.memory is not None:
        yield f"--mem={resources.memory}"
    yield from gpu_option(block.gpus, resources.gres)


def _job_options(cluster: ClusterConfig, output: str) -> Iterator[str]:
    """Options of the whole job; in a later block some of them would take effect for that one only."""
    if cluster.time:
        yield f"--time={cluster.time}"
    yield f"--output={shlex.quote(output)}"
    yield "--open-mode=append"
    yield f"--signal=B:{SIGNAL}@{cluster.signal_s}"
    yield "--requeue" if cluster.requeue else "--no-requeue"


def _directives(block: Block) -> Iterator[str]:
    for option, value in block.resources.directives.items():
        if value is True:
            yield f"#SBATCH --{option}"
        elif value is not None and value is not False:
            yield f"#SBATCH --{option}={shlex.quote(str(value))}"
