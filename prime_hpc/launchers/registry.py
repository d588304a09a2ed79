"""Which launcher runs a plan."""

import os
import shutil

from rich.console import Console

from prime_hpc.config.model_checks import find_unchecked
from prime_hpc.errors import InfrastructureFailure
from prime_hpc.launchers.local import run_local
from prime_hpc.launchers.prepare import RunStart
from prime_hpc.launchers.preview import check_site, show_estimates, show_start
from prime_hpc.launchers.slurm.allocation import check_allocation
from prime_hpc.launchers.slurm.batch import run_job
from prime_hpc.launchers.slurm.executor import adopt, refuse_live, submit
from prime_hpc.launchers.slurm.sbatch import write_scripts
from prime_hpc.observe.console import open_console
from prime_hpc.plan.table import render


def launch_plan(start: RunStart) -> int:
    """Run the plan of `start` under its launcher, or submit it, and return the exit code."""
    console = open_console()
    launcher = start.config.launcher
    if launcher.on_slurm and (launcher.submit or launcher.name == "dry_run"):
        check_site(start.plan)
    if launcher.name == "dry_run":
        return _write_only(start, console)
    refuse_live(start.paths)
    if launcher.on_slurm and not launcher.submit:
        check_allocation(start.plan, os.environ)
    if launcher.on_slurm and launcher.submit:
        return _submit(start, console)
    start.write()
    console.print(render(start.plan))
    if not launcher.on_slurm:
        return run_local(start.plan, start.config)
    return run_job(start.plan, adopt(start.plan, os.environ["SLURM_JOB_ID"]))


def _write_only(start: RunStart, console: Console) -> int:
    """Show the plan and write it down, except where a run of that name exists: its processes read those files."""
    if start.plan.attempt > 1:
        _show(start, console)
        console.print(f"\n{start.paths.root} exists, so nothing was written; nothing was started")
        return 0
    start.write_dry()
    scripts = write_scripts(start.plan) if start.config.launcher.on_slurm else []
    _show(start, console)
    for sentence in find_unchecked(start.config):
        console.print(f"\nnot checked: {sentence}", soft_wrap=True)
    *most, last = [start.paths.config, start.paths.plan, *scripts]
    console.print(f"\nwrote {', '.join(map(str, most))} and {last}; nothing was started")
    return 0


def _show(start: RunStart, console: Console) -> None:
    console.print(render(start.plan))
    show_estimates(start, console)
    if start.config.launcher.on_slurm:
        show_start(start.plan, console)


def _submit(start: RunStart, console: Console) -> int:
    """Submit the jobs of the plan; an attempt that Slurm refused never was, nor a run that began with it."""
    is_new = not start.paths.root.exists()
    start.write()
    console.print(render(start.plan))
    try:
        job = submit(start.plan)
    except BaseException as error:
        refused = isinstance(error, InfrastructureFailure)
        shutil.rmtree(start.paths.root if is_new and refused else start.paths.logs(start.plan.attempt))
        raise
    console.print(f"\nsubmitted as job {' and '.join(job.job_ids)}; logs come in {start.paths.root / 'logs'}")
    return 0
