"""Runs a plan as processes of this machine: the first failure stops the run, and the run says whose it was."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prime_hpc.cluster import secrets
from prime_hpc.cluster.files import list_fresh
from prime_hpc.cluster.gpus import count_gpus
from prime_hpc.cluster.lease import LeaseKeeper
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.role import COMPLETE_MARK
from prime_hpc.config.run import RunConfig
from prime_hpc.launchers.children import Child, spawn, stop
from prime_hpc.launchers.view import View, open_view
from prime_hpc.observe.snapshot import take_snapshot
from prime_hpc.plan.run_plan import RunPlan

POLL_S = 0.2
LEAVE_S = 30.0
EXIT_INTERRUPTED = 130


def run_local(plan: RunPlan, config: RunConfig) -> int:
    """Start every process of the plan, watch until the run is complete, stop them all. Returns an exit code."""
    paths = RunPaths(Path(plan.run_dir))
    secrets.create(paths.root)
    lease = LeaseKeeper(paths.rendezvous, plan.attempt, config.cluster.lease_s)
    children: list[Child] = []
    with _termination_as_interrupt(), open_view(plan, config.launcher.live) as view:
        try:
            gpus = count_gpus()
            children += (spawn(process, gpus) for process in plan.processes)
            failed = _watch(children, paths, view)
        except KeyboardInterrupt:
            view.say("interrupted, stopping every process")
            return EXIT_INTERRUPTED
        finally:
            stop(children, config.launcher.stop_grace_s)
            lease.close()
            secrets.remove(paths.root)
        return _verdict(failed, paths, view)


def _watch(children: list[Child], paths: RunPaths, view: View) -> Child | None:
    """Returns the child that failed first, or None once the run is complete and everybody has left."""
    complete_since = None
    while True:
        view.show(take_snapshot(paths, [c.plan for c in children]))
        if complete_since is None and COMPLETE_MARK in list_fresh(paths.rendezvous):
            complete_since = time.monotonic()
        codes = [child.exit_code for child in children]
        if complete_since is None:
            failed = [child for child, code in zip(children, codes, strict=True) if code not in (None, 0)]
            if failed:
                return failed[0]
            if None not in codes:
                return children[0]
        elif None not in codes or time.monotonic() - complete_since > LEAVE_S:
            return None
        time.sleep(POLL_S)


def _verdict(failed: Child | None, paths: RunPaths, view: View) -> int:
    if failed is None:
        view.say(f"complete; everything lies in {paths.root}")
        return 0
    view.say(f"{failed.name} failed first (exit code {failed.exit_code}); the end of {failed.plan.log}:\n")
    view.say(failed.last_lines())
    return 1


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
