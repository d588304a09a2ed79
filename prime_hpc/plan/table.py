"""A plan as a table for people."""

from rich.console import Group
from rich.table import Table

from prime_hpc.plan.run_plan import RunPlan


def render(plan: RunPlan) -> Group:
    """The placement table and one line about the run."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("process", "component", "node", "gpus", "command"):
        table.add_column(column, overflow="fold")
    for process in plan.processes:
        gpus = ",".join(map(str, process.gpus)) or "-"
        table.add_row(process.name, process.component, str(process.node), gpus, " ".join(process.command[1:3]))
    config = plan.config
    origin = f"resumes {plan.checkpoint}" if plan.checkpoint else f"starts from {config['model']['path']}"
    facts = f"{plan.name}: attempt {plan.attempt}, {config['mode']}, {config['max_steps']} steps, {origin}"
    return Group(facts, plan.run_dir, "", table)
