"""Whether weights can travel as the configuration asks, given where engines and trainer lie."""

from prime_hpc.config.run import RunConfig
from prime_hpc.config.sections import UpdateConfig
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.plan.run_plan import ProcessPlan, RunPlan

KEY = "update.transport"


def check_transport(config: RunConfig, plan: RunPlan) -> None:
    """Refuse NCCL on a GPU that engine and trainer share, and IPC where they share none.

    Raises:
        ConfigurationError: what would work instead is in the text.
    """
    transport = config.update.chosen
    engines, ranks = plan.engines(), plan.of("trainer")
    if config.mode != "rl" or not config.update.streams:
        return
    if transport == "nccl" and any(_beside(plan, engine) for engine in engines):
        _refuse(transport, "ipc or filesystem, since NCCL cannot connect two processes on one GPU")
    if transport == "nccl" and len({bool(process.gpus) for process in (*engines, *ranks)}) > 1:
        _refuse(transport, "filesystem or delta, since either the engines or the trainer have no GPU")
    if transport == "ipc" and not all(len(engine.gpus) == 1 and _beside(plan, engine) for engine in engines):
        _refuse(transport, "nccl or filesystem, since not every engine has one GPU, which a trainer rank shares")


def describe_transport(update: UpdateConfig) -> str:
    """For people: the transport, and whether it was chosen for them."""
    return f"weights by {update.chosen}{' (auto)' if update.transport == 'auto' else ''}"


def _beside(plan: RunPlan, engine: ProcessPlan) -> list[ProcessPlan]:
    """Trainer ranks on a GPU of the engine."""
    return [rank for rank in plan.of("trainer") if plan.shares_gpu(rank, engine)]


def _refuse(transport: str, expected: str) -> None:
    raise ConfigurationError([ConfigProblem(KEY, transport, expected)])
