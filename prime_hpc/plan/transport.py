"""How weights travel, given where engines and trainer lie."""

from prime_hpc.config.run import RunConfig
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.plan.run_plan import ProcessPlan, RunPlan

KEY = "update.transport"


def settle_transport(config: RunConfig, plan: RunPlan) -> None:
    """Write into the plan what `auto` stands for; refuse NCCL on a GPU that engine and trainer share, and IPC where
    they share none.

    Raises:
        ConfigurationError: what would work instead is in the text.
    """
    if config.update.transport == "auto":
        plan.config["update"]["transport"] = _choose(config, plan)
    elif config.mode == "rl" and config.update.streams:
        _check(config.update.transport, plan)


def _choose(config: RunConfig, plan: RunPlan) -> str:
    """From memory to memory between GPUs, by files else, as adapters and weights for engines of another run travel."""
    engines, ranks = plan.engines(), plan.of("trainer")
    if config.mode != "rl" or config.lora.served or not engines or not all(p.gpus for p in (*engines, *ranks)):
        return "filesystem"
    if all(_shares_its_only_gpu(plan, engine) for engine in engines):
        return "ipc"
    return "filesystem" if any(_beside(plan, engine) for engine in engines) else "nccl"


def _check(transport: str, plan: RunPlan) -> None:
    engines, ranks = plan.engines(), plan.of("trainer")
    if transport == "nccl" and any(_beside(plan, engine) for engine in engines):
        _refuse(transport, "ipc or filesystem, since NCCL does not connect two processes on one GPU")
    if transport == "nccl" and len({bool(process.gpus) for process in (*engines, *ranks)}) > 1:
        _refuse(transport, "filesystem or delta, since either the engines or the trainer have no GPU")
    if transport == "ipc" and not all(_shares_its_only_gpu(plan, engine) for engine in engines):
        _refuse(transport, "nccl or filesystem, since not every engine has one GPU, which a trainer rank shares")


def _shares_its_only_gpu(plan: RunPlan, engine: ProcessPlan) -> bool:
    return len(engine.gpus) == 1 and bool(_beside(plan, engine))


def _beside(plan: RunPlan, engine: ProcessPlan) -> list[ProcessPlan]:
    """Trainer ranks on a GPU of the engine."""
    return [rank for rank in plan.of("trainer") if plan.shares_gpu(rank, engine)]


def _refuse(transport: str, expected: str) -> None:
    raise ConfigurationError([ConfigProblem(KEY, transport, expected)])
