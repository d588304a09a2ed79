"""What every process of a run does beside its work: identity, logs, rendezvous, lease, and a clean end."""

import argparse
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from prime_hpc.cluster import log_lines, secrets
from prime_hpc.cluster.beats import Heart
from prime_hpc.cluster.faults import Faults
from prime_hpc.cluster.files import list_fresh
from prime_hpc.cluster.lease import EXIT_FENCED, LeaseReader
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.patience import Patience
from prime_hpc.cluster.rendezvous import STEP_VARIABLE, Rendezvous
from prime_hpc.cluster.staging import stage
from prime_hpc.cluster.stopping import StoppingMarks
from prime_hpc.config.run import RunConfig
from prime_hpc.errors import InfrastructureFailure, PrimeHPCError
from prime_hpc.plan.run_plan import ProcessPlan, RunPlan, load

COMPLETE_MARK = "complete"
DRAIN_MARK = "drain"
UNIT_VARIABLE = "PRIME_HPC_UNIT"
"""Tells a task under Slurm which unit it belongs to; SLURM_PROCID then says which of its processes it is."""
LEAVE_GRACE_S = 10.0
EXIT_FINAL = 78
"""Exit code of a process that would fail again if it were started again."""
RESTART_VARIABLE = "PRIME_HPC_RESTART"
BEATS_PER_HANG = 12
LOADERS = ("inference", "trainer")
"""Components whose processes load weights."""


class Role:
    """One process of the plan, as its own code sees it."""

    def __init__(self, plan: RunPlan, process: ProcessPlan):
        self.plan = plan
        self.process = process
        self.config: RunConfig = plan.typed_config()
        self.paths = RunPaths(Path(plan.run_dir))
        self.restart = int(os.environ.get(RESTART_VARIABLE, "0"))
        """How often this process was started before in its attempt."""
        self.heart = Heart(self.paths.rendezvous, process.name, plan.attempt, self.restart,
                           min(self.config.recovery.hang_s / BEATS_PER_HANG, 5.0))  # fmt: skip
        self.patience = Patience(self.config.recovery.full_disk_s, self.heart, logging.getLogger(process.name))
        self.reach = Faults(process.name, self.restart).reach
        self.rendezvous = Rendezvous(self.paths.rendezvous, process.name, plan.attempt)
        self.secrets = secrets.load(self.paths.root)
        self.lease = LeaseReader(self.paths.rendezvous, plan.attempt, self.config.cluster.lease_s)
        self.log = logging.getLogger(process.name)
        self._leaving = False
        remote = plan.nodes > 1 or (self.config.mode == "serve" and self.config.launcher.on_slurm)
        self.bind_host = "0.0.0.0" if remote else "127.0.0.1"
        """Interface to listen on: loopback unless the plan has several nodes, or runs on other nodes attach to it."""
        self.advertised_host = socket.gethostname() if remote else "127.0.0.1"
        """What others put into an address of this process."""

    @property
    def run_complete(self) -> bool:
        """The orchestrator (or, in SFT, trainer rank 0) has declared the run complete."""
        return COMPLETE_MARK in list_fresh(self.paths.rendezvous)

    def mark_complete(self) -> None:
        (self.paths.rendezvous / COMPLETE_MARK).touch()

    @property
    def draining(self) -> bool:
        """The run was asked to finish its step, save and leave."""
        return DRAIN_MARK in list_fresh(self.paths.rendezvous)

    def stage_model(self) -> None:
        """Load the model of this process from the node's own disk, where `cluster.scratch` names a folder there."""
        cluster, frozen = self.config.cluster, self.process.frozen
        model = self.config.frozen[frozen] if frozen else self.config.model
        if not (cluster.scratch and model.path and self.process.component in LOADERS):
            return
        with self.heart.waiting(f"a copy of {model.path}", "this node", cluster.start_timeout_s):
            start = f"{self.plan.run_dir} attempt {self.plan.attempt}"
            model.path = str(stage(Path(model.path), cluster.scratch, start, cluster.start_timeout_s))
        self.log.info("loads its model from %s", model.path)

    def quieten(self, *libraries: str) -> None:
        """Hear only warnings of libraries that tell every request, unless all is to be told."""
        if self.config.monitor.log_level != "debug":
            for library in libraries:
                logging.getLogger(library).setLevel(logging.WARNING)

    def on_terminate(self, leave: Callable[[], object]) -> Callable[..., None]:
        """A handler for SIGTERM that calls `leave`.

        Under Slurm it does so only for a SIGTERM of our own. Slurm sends one some time before it ends a job: until
        then the run is drained, which takes every process.
        """

        def handle(*_: object) -> None:
            ours = self._leaving or STEP_VARIABLE not in os.environ
            if ours or StoppingMarks(self.paths).stands(os.environ[UNIT_VARIABLE]):
                leave()
            else:
                self.log.warning("Slurm sent SIGTERM: at work until the supervisor says otherwise")

        return handle

    def start_watch(self, *, leave_when_complete: bool) -> None:
        """Leave by SIGTERM when the lease is lost or, for servers, once the run is complete."""
        threading.Thread(target=self._watch, args=(leave_when_complete,), name="watch", daemon=True).start()

    def _watch(self, leave_when_complete: bool) -> None:
        while True:
            time.sleep(0.5)
            try:
                self.lease.check()
            except InfrastructureFailure as error:
                self.log.error("leaving: %s", error)
                self._leave(EXIT_FENCED)
            if leave_when_complete and self.run_complete:
                self.log.info("the run is complete, leaving")
                self._leave(0)

    def _leave(self, code: int) -> None:
        self._leaving = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LEAVE_GRACE_S)
        os._exit(code)


def main(run: Callable[[Role], None], *, server: bool) -> None:
    """Entry point of a role module: `python -m prime_hpc.<role> PLAN.json --process NAME`.

    `server` roles leave by themselves once the run is complete; the others end when `run` returns.
    """
    parser = argparse.ArgumentParser(description=sys.modules[run.__module__].__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--process", required=True)
    args = parser.parse_args()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    plan = load(args.plan)
    role = Role(plan, plan.process(args.process))
    log_lines.set_up(role.config.monitor, role.process.name)
    role.quieten("httpx", "httpcore", "openai")
    role.rendezvous.publish("starting")
    role.heart.start()
    signal.signal(signal.SIGTERM, role.on_terminate(_die))
    role.start_watch(leave_when_complete=server)
    try:
        role.stage_model()
        run(role)
    except KeyboardInterrupt:
        role.rendezvous.publish("stopped")
        sys.exit(130)
    except Exception as raised:
        error = first_cause(raised)
        if not isinstance(error, PrimeHPCError) or error.__cause__:  # else its text says all that its reader needs
            traceback.print_exception(error)
        role.rendezvous.publish("failed", error=f"{type(error).__name__}: {error}")
        role.log.error("%s: %s", type(error).__name__, error)
        sys.exit(EXIT_FINAL if isinstance(error, PrimeHPCError) and not error.restartable else 1)
    role.rendezvous.publish("done")


def _die() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def first_cause(error: BaseException) -> BaseException:
    """The first error inside nested exception groups: what went wrong before everything else was cancelled."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
