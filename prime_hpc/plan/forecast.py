"""The estimates of a plan as tables for people."""

from rich.console import Group, RenderableType
from rich.table import Table

from prime_hpc.plan.devices import GIB
from prime_hpc.plan.disk import Disk
from prime_hpc.plan.foresight import Foresight
from prime_hpc.plan.memory import RoleMemory
from prime_hpc.plan.time import Pace


def render(foresight: Foresight) -> RenderableType:
    """Memory by role, disk, pace and cost, with the assumptions behind them and whatever does not fit."""
    blocks: list[RenderableType] = [
        f"estimates for {foresight.parameters / 1e9:.3g}B parameters (how exact they are: docs/foresight.md)",
        _memory(foresight.roles),
        *(role.note for role in foresight.roles if role.note),
        "",
        _disk(foresight.disk),
    ]
    if foresight.pace:
        blocks += ["", _pace(foresight.pace), f"assumed: {'; '.join(foresight.assumptions)}"]
    blocks += [f"warning: {words}" for words in foresight.warnings]
    return Group(*blocks)


def _memory(roles: list[RoleMemory]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("each", "how many", "GPU GiB", "host GiB", "of which"):
        table.add_column(column, overflow="fold")
    for role in roles:
        gpu = _gib(role.gpu_bytes) + (f" of {_gib(role.limit)}" if role.limit else "") if role.gpu else "-"
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in (role.gpu or role.host).items())
        table.add_row(role.role, str(role.processes), gpu, _gib(role.host_bytes), parts)
    return table


def _disk(disk: Disk) -> str:
    if not disk.total:
        return "disk: logs alone"
    parts = [f"{disk.checkpoints} checkpoints of {_gib(disk.checkpoint)}", f"the final model {_gib(disk.model)}"]
    if disk.versions:
        parts.insert(1, f"{disk.versions} weight versions of {_gib(disk.version)}")
        parts.append(f"rollouts {_gib(disk.records)}")
    return f"disk: {_gib(disk.total)} GiB: {', '.join(parts)}"


def _pace(pace: Pace) -> str:
    sides, tokens = {"training": pace.train_s}, f"{pace.trained_per_s:,.0f} trained"
    if pace.sampled_tokens:
        sides |= {"publishing": pace.publish_s, "sampling": pace.sample_s, "loading": pace.load_s}
        tokens += f" and {pace.sampled_per_s:,.0f} sampled"
    parts = ", ".join(f"{name} {_number(seconds)}" for name, seconds in sides.items())
    return (f"step: {_number(pace.step_s)} s ({parts}); {tokens} tokens/s; {pace.steps} steps in "
            f"{_number(pace.hours)} h, {_number(pace.gpu_hours)} GPU-hours on {pace.gpus} GPUs")  # fmt: skip


def _gib(size: float) -> str:
    return _number(size / GIB)


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
