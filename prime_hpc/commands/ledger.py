"""The ledger of a run as tables for people: what `status --ledger` shows."""

from rich.console import Group, RenderableType
from rich.table import Table

from prime_hpc.observe.advisor import Advice
from prime_hpc.observe.ledger import AttemptLedger, Ledger


def render_ledger(ledger: Ledger, advice: Advice | None) -> RenderableType:
    """A row an attempt, then recoveries, idle shares, cost and advice."""
    recoveries = [f"recovered: {r.unit} after {r.seconds:.1f} s ({r.reason})"
                  for attempt in ledger.attempts for r in attempt.recoveries]  # fmt: skip
    idle = ", ".join(f"{component} {share:.0%}" for component, share in ledger.idle.items())
    cost = f"cost: {ledger.node_hours:.2f} node-hours, {ledger.gpu_hours:.2f} GPU-hours"
    energy = f", {ledger.energy_kwh:.2f} kWh" if ledger.energy_kwh else ""
    return Group(_attempts(ledger.attempts), *recoveries, f"idle: {idle or 'not measured'}", cost + energy,
                 *_advice(advice))  # fmt: skip


def _attempts(attempts: list[AttemptLedger]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("attempt", "queued", "startup", "first step after", "worked", "ending"):
        table.add_column(column, overflow="fold")
    for attempt in attempts:
        startup = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in attempt.startup_s.items())
        table.add_row(str(attempt.attempt), _seconds(attempt.queued_s), startup or "-", _seconds(attempt.first_step_s),
                      _seconds(attempt.worked_s), attempt.ending)  # fmt: skip
    return table


def _advice(advice: Advice | None) -> list[str]:
    if advice is None:
        return ["advice: not enough was measured yet (settled steps, and rollout records: monitor.rollouts=true)"]
    if not advice.faithful:
        return [f"advice: none, as the simulation misses the measured step by {abs(advice.error):.0%} "
                f"({advice.now.step_s:.2f} s in place of {advice.measured_step_s:.2f} s)"]  # fmt: skip
    base = f"a step takes {advice.measured_step_s:.2f} s; simulated as it is, {advice.now.step_s:.2f} s"
    if not advice.overrides:
        return [f"advice: leave the balance as it is; {base}"]
    return [f"advice: {advice.best.step_s:.2f} s a step ({advice.gain:.0%} less) by simulation; {base}",
            f"    {' '.join(advice.overrides)}"]  # fmt: skip


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} s"
