"""What squeue knows of a job while it waits or runs, and for a while after."""

import datetime
import os
import shutil
import subprocess

from prime_hpc.errors import InfrastructureFailure

STATE, SUBMITTED, STARTED, ENDS, REASON = "%T", "%V", "%S", "%e", "%r"
FORGOTTEN = "Invalid job id"
"""What squeue says of a job that ended some time ago."""


def ask(job_id: str, field: str) -> dict[str, str]:
    """`field`, as `squeue --format` names it, of every part of a job by the part's own id.

    Empty where Slurm has forgotten the job, where the controller does not answer just now, or without Slurm.
    """
    return _ask(job_id, field)[0]


def state(job_id: str) -> str | None:
    """State of the job, or part of a job, of that id."""
    return ask(job_id, STATE).get(job_id)


def certain_state(job_id: str) -> str | None:
    """The same where it matters that there is no such job any more; None without Slurm too.

    Raises:
        InfrastructureFailure: Slurm does not tell.
    """
    found, complaint = _ask(job_id, STATE)
    if complaint and FORGOTTEN not in complaint:
        raise InfrastructureFailure(f"Slurm does not tell whether job {job_id} waits or runs: {complaint}; "
                                    "try again once `squeue` answers")  # fmt: skip
    return found.get(job_id)


def describe_wait(job_id: str) -> str:
    """Why a job that has not begun waits, or that it will not begin any more; empty where there is no Slurm."""
    if not _installed():
        return ""
    found = state(job_id)
    if found == "PENDING":
        return f"job {job_id} is pending: {ask(job_id, REASON).get(job_id, 'no reason given')}"
    return f"job {job_id} is {found.lower()}" if found else f"job {job_id} is not in the queue any more"


def moment(job_id: str, field: str) -> float | None:
    """A time of the job (epoch), asked anew as it may change; None where there is none, as without a time limit."""
    try:
        return datetime.datetime.fromisoformat(ask(job_id, field).get(job_id, "").strip()).timestamp()
    except ValueError:  # absent, "N/A" or "Unknown"
        return None


def _ask(job_id: str, field: str) -> tuple[dict[str, str], str]:
    """What squeue answers, and what it complains of where it fails."""
    if not _installed():
        return {}, ""
    command = ["squeue", "--noheader", "--states=all", f"--format=%A {field}", "--jobs", job_id]
    asked = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "SLURM_TIME_FORMAT": "standard"})
    complaint = asked.stderr.strip() or f"exit code {asked.returncode}" if asked.returncode else ""
    return dict(line.split(maxsplit=1) for line in asked.stdout.splitlines()), complaint


def _installed() -> bool:
    return shutil.which("squeue") is not None
