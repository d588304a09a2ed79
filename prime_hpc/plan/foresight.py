"""What a plan will need and how fast it will be, before anything is submitted."""

import shutil
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from prime_hpc.config.cluster import component
from prime_hpc.config.run import RunConfig
from prime_hpc.config.slurm_checks import MEBIBYTES, mebibytes
from prime_hpc.models.families import runs_one_by_one
from prime_hpc.models.spec import HFConfig, param_count
from prime_hpc.plan.devices import DEVICES, GIB, device_of
from prime_hpc.plan.disk import Disk, disk_use
from prime_hpc.plan.memory import RoleMemory, engine_memory, other_memory, trainer_memory
from prime_hpc.plan.run_plan import RunPlan
from prime_hpc.plan.time import Pace, assumptions, estimate_pace
from prime_hpc.plan.workload import Workload, guess, micro_batches, sequences


@dataclass(frozen=True)
class Foresight:
    """The estimates of a plan; `pace` is None where the GPUs are not known, or there are none."""

    parameters: int
    roles: list[RoleMemory]
    disk: Disk
    pace: Pace | None
    assumptions: list[str]
    warnings: list[str]


def foresee(plan: RunPlan, config: RunConfig, hf_config: HFConfig, *, here: str | None = None,
            workload: Workload | None = None) -> Foresight:  # fmt: skip
    """The estimates of a plan whose model has the configuration `hf_config`.

    Args:
        here: name of this machine's GPU, for a run that is local.
        workload: lengths of rollouts; guessed when left out.
    """
    workload = workload or guess(config)
    roles = _roles(plan, config, hf_config, workload, here)
    disk = disk_use(config, hf_config, workload)
    pace = _pace(plan, config, hf_config, workload, here)
    return Foresight(
        parameters=param_count(hf_config),
        roles=roles,
        disk=disk,
        pace=pace,
        assumptions=assumptions(config, workload) if pace else [],
        warnings=[
            *_overfull(roles, config),
            *_short_of_memory(plan, config, roles),
            *_short_of_disk(Path(plan.run_dir), disk),
            *_unknown(plan, config, pace),
            *_one_by_one(plan, config, hf_config),
        ],
    )


def _roles(plan: RunPlan, config: RunConfig, hf_config: HFConfig, workload: Workload,
           here: str | None) -> list[RoleMemory]:  # fmt: skip
    roles = []
    if engines := plan.engines():
        gpus = sum(len(p.gpus) for p in plan.of("inference") if p.index == 0)
        roles.append(engine_memory(config, hf_config, gpus=gpus, device=device_of(config, "inference", here),
                                   beside_trainer=_share_gpus(plan)))  # fmt: skip
    if ranks := plan.of("trainer"):
        roles.append(trainer_memory(config, hf_config, on_gpu=bool(ranks[0].gpus),
                                    device=device_of(config, "trainer", here),
                                    rows=micro_batches(config, sequences(config), workload)))  # fmt: skip
    return roles + (other_memory(config) if engines and ranks else [])


def _share_gpus(plan: RunPlan) -> bool:
    """Whether trainer ranks use GPUs of engines."""
    taken = {(plan.host(p), gpu) for p in plan.of("inference") for gpu in p.gpus}
    return any((plan.host(p), gpu) in taken for p in plan.of("trainer") for gpu in p.gpus)


def _pace(plan: RunPlan, config: RunConfig, hf_config: HFConfig, workload: Workload, here: str | None) -> Pace | None:
    ranks, trainer = plan.of("trainer"), device_of(config, "trainer", here)
    if not ranks or not ranks[0].gpus or trainer is None:
        return None
    return estimate_pace(
        config,
        hf_config,
        workload,
        trainer=trainer,
        engine=device_of(config, "inference", here) if plan.engines() else None,
        engine_gpus=sum(len(p.gpus) for p in plan.of("inference") if p.index == 0),
        trainer_nodes=len({plan.host(p) for p in ranks}),
        gpus=plan.held_gpus,
    )


def _overfull(roles: list[RoleMemory], config: RunConfig) -> list[str]:
    """What does not fit into a GPU, by the estimate."""
    words = []
    for role in roles:
        if role.limit and role.gpu_bytes > role.limit:
            most = max(role.gpu, key=lambda part: role.gpu[part])
            words.append(f"a {role.role} needs about {role.gpu_bytes / GIB:.0f} GiB of its GPU's "
                         f"{role.limit / GIB:.0f}, most for {most}: {_remedy(most, config)}")  # fmt: skip
        if role.gpu.get("KV cache") == 0:
            words.append("an engine's weights leave no room for its KV cache: more GPUs an engine "
                         "(inference.vllm.tensor_parallel_size)")  # fmt: skip
    return words


def _remedy(part: str, config: RunConfig) -> str:
    """What makes the largest part of a GPU's memory smaller, and is not done yet."""
    if part == "logits":
        return "a smaller trainer.head_chunk_tokens"
    if part != "activations":
        return "more GPUs (trainer.ranks, inference.vllm.tensor_parallel_size)"
    wanted = {"activation_checkpointing": "full", "activation_checkpointing_every": 1}
    undone = [f"trainer.{key}={value}" for key, value in wanted.items() if getattr(config.trainer, key) != value]
    return ", then ".join([*undone, "trainer.parallel.cp or a shorter seq_len"])


def _short_of_memory(plan: RunPlan, config: RunConfig, roles: list[RoleMemory]) -> list[str]:
    """Groups of nodes whose processes need more host memory than is asked for."""
    words = []
    for group in plan.groups if config.launcher.on_slurm else ():
        asked = component(config.cluster, group.name).memory or "0"
        need = sum(r.host_bytes * ceil(r.processes / group.nodes) for r in roles if r.role in _ON_NODES[group.name])
        if 0 < mebibytes(asked) * 2**20 < need:
            unit = "" if asked[-1] in MEBIBYTES else " MiB, as a number without a letter means"
            words.append(f"a node of {group.name} needs about {need / GIB:.0f} GiB of host memory, not {asked}{unit}: "
                         f"raise cluster.components.{group.name}.memory")  # fmt: skip
    return words


_ON_NODES = {
    "orchestrator": ("orchestrator", "environment"),
    "inference": ("engine", "engine GPU"),
    "trainer": ("trainer rank",),
}


def _short_of_disk(run_dir: Path, disk: Disk) -> list[str]:
    existing = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if disk.total <= free:
        return []
    return [f"the run needs about {disk.total / GIB:.0f} GiB of disk and {existing} has {free / GIB:.0f} free: another "
            "run.output_dir, a smaller checkpoint.keep_last, or a larger checkpoint.every"]  # fmt: skip


def _unknown(plan: RunPlan, config: RunConfig, pace: Pace | None) -> list[str]:
    if pace or not any(p.gpus for p in plan.of("trainer")):
        return []
    given = component(config.cluster, "trainer").gpu
    if given is None:
        return ["no estimate of time: cluster.gpu does not say which GPUs the nodes have, e.g. cluster.gpu=H200"]
    return [f"no estimate of time: cluster.gpu={given} is none of {', '.join(DEVICES)}"]


def _one_by_one(plan: RunPlan, config: RunConfig, hf_config: HFConfig) -> list[str]:
    if not plan.of("trainer") or not runs_one_by_one(config, hf_config):
        return []
    return ["the trainer runs the documents of a row one by one, as in transformers those of this model would see one "
            "another: slower than estimated, the more so the shorter they are"]  # fmt: skip
