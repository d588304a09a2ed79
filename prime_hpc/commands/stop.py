"""Stop a run: at once, or with --drain after the step it is in, saved. A job that has not begun is cancelled.

    python -m prime_hpc.stop RUN [--drain] [--why TEXT] [--no-wait]

Exit code 0 once the run has ended (with --no-wait: once it was asked to), 2 where it does not work.
"""

import sys
import time
from pathlib import Path

from prime_hpc.cluster import control
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.commands import cli
from prime_hpc.errors import InfrastructureFailure
from prime_hpc.launchers.slurm.executor import find
from prime_hpc.launchers.slurm.jobs import RunJob
from prime_hpc.launchers.slurm.queue import state
from prime_hpc.observe.run_facts import read_run

POLL_S = 0.5


def main(arguments: list[str] | None = None) -> int:
    """Exit code of the command."""
    parser = cli.parser(__doc__)
    parser.add_argument("--drain", action="store_true", help="finish the step, save, then leave")
    parser.add_argument("--why", default="", help="for the record")
    parser.add_argument("--no-wait", action="store_true", help="return at once")
    args = parser.parse_args(arguments)

    def stop() -> int:
        if waiting := _waiting(args.run):
            waiting.cancel()
            print(f"cancelled job {' and '.join(waiting.job_ids)}, which had not begun")
            return 0
        request(args.run, "drain" if args.drain else "stop", args.why)
        if not args.no_wait:
            print("asked; waiting for the end (Ctrl-C ends the wait, not the request)")
            wait_for_end(args.run)
        return 0

    return cli.run(stop)


def request(run_dir: Path, action: control.Action, why: str) -> None:
    """Ask the supervisor for `action` on the whole run.

    Raises:
        InfrastructureFailure: the run does not work, so nobody would answer.
    """
    if not read_run(run_dir).live:
        raise InfrastructureFailure(f"{run_dir} has no supervisor at work, so there is nothing to {action}; "
                                    f"python -m prime_hpc.doctor {run_dir} says what became of it")  # fmt: skip
    control.ask(RunPaths(run_dir).control, action, why)


def _waiting(run_dir: Path) -> RunJob | None:
    """The Slurm job of a run that has not begun, or not again, so that nobody would take a request."""
    facts = read_run(run_dir)
    job = None if facts.live else find(facts.plan)
    return job if job and state(job.job_ids[0]) == "PENDING" else None


def wait_for_end(run_dir: Path) -> None:
    """Return once the supervisor has said that it is over, or has given no sign for as long as the lease."""
    while read_run(run_dir).live:
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
