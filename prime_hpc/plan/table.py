"""A plan as a table for people."""

from pathlib import Path

from rich.console import Group
from rich.table import Table

from prime_hpc.config.run import RunConfig
from prime_hpc.config.trainer import SFTValidation
from prime_hpc.plan.run_plan import ProcessPlan, RunPlan
from prime_hpc.plan.units import Unit, units


def render(plan: RunPlan) -> Group:
    """Placement and one line about the run: by process on one node, by restart unit on several."""
    config = plan.typed_config()
    start = config.start_from.words if config.start_from.path else config.model.path or "random weights"
    origin = f"resumes {plan.checkpoint}" if plan.checkpoint else f"starts from {start}"
    facts = f"{plan.name}: attempt {plan.attempt}, {config.mode}, {_length(config)}, {origin}"
    if config.mode == "rl":
        facts += f"; weights by {config.update.chosen}"
    if config.mode == "sft" and config.trainer.sft.validation.every:
        facts += f"; {_validation(config.trainer.sft.validation)}"
    tables = [_process_table(plan)] if plan.nodes == 1 else [_group_table(plan), "", _unit_table(plan)]
    return Group(facts, plan.run_dir, "", *tables)


def _length(config: RunConfig) -> str:
    if config.mode == "serve":
        return "until it is stopped"
    return "an evaluation" if config.evaluates_alone else f"{config.max_steps} steps"


def _validation(validation: SFTValidation) -> str:
    rows = ", ".join(Path(file.path).name for file in validation.data) or f"{validation.rows} rows held out"
    return f"validation on {rows} every {validation.every} steps"


def _process_table(plan: RunPlan) -> Table:
    table = _table("process", "component", "node", "gpus", "module")
    for process in plan.processes:
        gpus = ",".join(map(str, process.gpus)) or "-"
        table.add_row(process.name, process.component, str(process.node), gpus, _module(process))
    return table


def _group_table(plan: RunPlan) -> Table:
    table = _table("nodes of", "nodes", "spare", "gpus a node", "numbers")
    for group in plan.groups:
        numbers = _span(group.first, group.nodes + group.spare)
        table.add_row(group.name, str(group.nodes), str(group.spare or "-"), str(group.gpus or "-"), numbers)
    table.add_row("in all", str(plan.nodes), "", f"{plan.held_gpus} together" if plan.held_gpus else "-", "")
    return table


def _unit_table(plan: RunPlan) -> Table:
    table = _table("step", "component", "nodes", "processes", "gpus each", "module")
    for unit in units(plan):
        first = unit.processes[0]
        table.add_row(unit.name, first.component, _span(plan.host(first), unit.nodes), _count(unit),
                      str(len(first.gpus) or "-"), _module(first))  # fmt: skip
    return table


def _module(process: ProcessPlan) -> str:
    """What the interpreter runs (`python -m MODULE`), or the program where there is none."""
    program, *arguments = process.command
    return arguments[1] if arguments[:1] == ["-m"] else Path(program).name


def _count(unit: Unit) -> str:
    return f"{unit.nodes} x {unit.per_node}" if unit.nodes > 1 else str(unit.per_node)


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
