"""The srun command line of each restart unit, and the environment in which srun is started."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.role import UNIT_VARIABLE
from prime_hpc.config.cluster import component
from prime_hpc.launchers.slurm.allocation import Block, job_of
from prime_hpc.launchers.slurm.containers import mounts, srun_options, wrap
from prime_hpc.plan.build import interpreter
from prime_hpc.plan.run_plan import RunPlan
from prime_hpc.plan.units import Unit

LEAKS = frozenset(
    "CUDA_VISIBLE_DEVICES GPU_DEVICE_ORDINAL ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK SLURM_JOB_GPUS SLURM_STEP_GPUS "
    "SLURM_GPUS_ON_NODE SLURM_MEM_PER_CPU SLURM_MEM_PER_NODE SLURM_MEM_PER_GPU SLURM_NTASKS SLURM_NPROCS SLURM_NNODES "
    "SLURM_NTASKS_PER_NODE SLURM_CPUS_PER_TASK SLURM_TASKS_PER_NODE SLURM_DISTRIBUTION".split()
)
"""What describes the batch script's own group only: srun would take it for the step's, in whatever group that runs."""


def step_command(plan: RunPlan, unit: Unit, hosts: Sequence[str] = ()) -> list[str]:
    """The srun command line that runs every process of `unit` as one step of the job it belongs to.

    The step lies on the nodes of the plan, counted within its het group or allocation, or on `hosts`, which must be
    named once the job has lost a node, since Slurm counts anew then. Steps share cores and GPUs where they meet on a
    node (`--overlap`); each task narrows the GPUs it sees to those of its process. To stop a step gently, signal its
    tasks with scancel; SIGTERM to srun itself kills them.
    """
    config, job = plan.typed_config(), job_of(plan, unit)
    number = job.block_number(unit.group)
    block, container = job.blocks[number], component(config.cluster, unit.group.name).container
    folder = RunPaths(Path(plan.run_dir)).slurm / unit.name
    worker = [interpreter(config, unit.group.name), "-u", "-m", "submitit.core._submit", str(folder)]
    inside = mounts(plan.run_dir, config.model.path, container)
    group = [f"--het-group={number}"] if len(job.blocks) > 1 else []
    return ["srun", *group, *_nodes(block, unit, hosts), *_tasks(block, unit), *_gpus(block, unit),
            "--overlap", "--kill-on-bad-exit=1", "--mpi=none", "--input=none", "--label",
            f"--job-name={unit.name}", f"--export=ALL,SUBMITIT_EXECUTOR=slurm,{UNIT_VARIABLE}={unit.name}",
            *srun_options(container, inside), *wrap(container, inside, worker, gpus=_uses_gpus(unit))]  # fmt: skip


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for srun, made from that of the batch script."""
    return {name: value for name, value in environment.items() if name not in LEAKS}


def gpu_option(gpus: int, gres: str | None) -> list[str]:
    """How `gpus` GPUs of a node are asked for; nothing for none."""
    if gpus == 0:
        return []
    return [f"--gres={gres}:{gpus}"] if gres else [f"--gpus-per-node={gpus}"]


def _nodes(block: Block, unit: Unit, hosts: Sequence[str]) -> list[str]:
    first = block.number(unit.group) + unit.first_node
    return [f"--nodelist={','.join(hosts)}" if hosts else f"--relative={first}", f"--nodes={unit.nodes}"]


def _tasks(block: Block, unit: Unit) -> list[str]:
    """Tasks in order of node, with their share of the cores; srun does not take that over from the job."""
    cores = (block.resources.cpus or 0) // unit.per_node
    share = f"--cpus-per-task={cores}" if cores else "--overcommit"
    return [f"--ntasks={len(unit.processes)}", f"--ntasks-per-node={unit.per_node}", "--distribution=block", share]


def _gpus(block: Block, unit: Unit) -> list[str]:
    return gpu_option(block.gpus, block.resources.gres) if _uses_gpus(unit) else []


def _uses_gpus(unit: Unit) -> bool:
    return any(process.gpus for process in unit.processes)
