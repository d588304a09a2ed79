"""What a cause is, and the causes that the logic of the diagnosis knows by name."""

import re
import signal
from dataclasses import dataclass

from prime_hpc.cluster.lease import EXIT_FENCED

EXTRAS = {"vllm": "gpu", "wandb": "wandb", "matplotlib": "plot", "hydra_plugins": "sweep", "gguf": "gguf",
          "accelerate": "gguf"}  # fmt: skip
"""Modules that an extra of this product installs."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One way to fail: what gives it away, what to say, what to do.

    `pattern` is searched in error texts and log lines; `codes` are exit codes that count where no pattern of an earlier
    cause speaks, a signal below 0. A `symptom` follows from what another process did; its pattern names that one as
    `owner` where it can. `says` and `remedy` may name `{process}`, `{run}` (its directory), `{install}` (of a missing
    package), and the groups of the pattern.
    """

    name: str
    says: str
    remedy: str
    pattern: re.Pattern[str] | None = None
    codes: tuple[int, ...] = ()
    component: str | None = None
    symptom: bool = False


def told(name: str, pattern: str, says: str, remedy: str, *, component: str | None = None,
         symptom: bool = False) -> Cause:  # fmt: skip
    """A cause that a text gives away."""
    return Cause(name=name, pattern=re.compile(pattern), says=says, remedy=remedy, component=component, symptom=symptom)


def died(name: str, signum: signal.Signals, says: str, remedy: str) -> Cause:
    """A cause that only the signal gives away."""
    return Cause(name=name, codes=(-signum,), says=says, remedy=remedy)


def how_to_install(groups: dict[str, str]) -> str:
    """What brings the module of a failed import."""
    if module := groups.get("module"):
        extra = EXTRAS.get(module)
        return f"pip install 'prime-hpc[{extra}]'" if extra else f"the package of the module {module}"
    return groups.get("what", "")


TIME_LIMIT = told(
    "time limit",
    r"DUE TO TIME LIMIT",
    "the job reached its time limit",
    "ask for more time, or save more often with checkpoint.every",
)
PREEMPTED = told(
    "preemption",
    r"DUE TO PREEMPTION",
    "the job was preempted",
    "nothing is wrong with the run; a smaller checkpoint.every loses less",
)
NODE_FAILURE = told(
    "node failure",
    r"DUE TO NODE FAILURE",
    "a node of the job failed",
    "leave the node out (`--exclude` on Slurm) and tell its administrators",
)
OUT_OF_HOST_MEMORY = told(
    "out of host memory",
    r"oom[-_]kill event|: Out Of Memory\b|xceeded (?:step|job) memory limit|\bMemoryError\b|Cannot allocate memory"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory",
    "{process} ran out of host memory",
    "give the job more memory (`--mem` on Slurm), or need less: fewer env.workers or env.rollouts_per_worker, a "
    "smaller trainer.micro_batch_tokens",
)
KILLED = Cause(
    name="killed",
    pattern=re.compile(r"Failed core proc\(s\): \{.*: -9\b"),
    codes=(-signal.SIGKILL,),
    says="{process} was killed by SIGKILL",
    remedy="most often the kernel ran out of memory: look at the memory of the node, and give the job more or need "
    "less (fewer env.workers, a smaller trainer.micro_batch_tokens); otherwise somebody killed it by hand",
)
ENGINE_DIED = told(
    "engine died",
    r"Engine core initialization failed|EngineDeadError|EngineCore encountered|the engine process died|vLLM failed: ",
    "the engine of {process} died without saying why",
    "read its log; a cause that is missing there is often the kernel's out-of-memory killer",
    symptom=True,
)
COLLECTIVE_TIMEOUT = told(
    "collective time-out",
    r"Watchdog caught collective operation timeout: .*OpType=(?P<what>\w+)"
    r"|Timed out waiting \d+ms for (?:recv|send) operation to complete|wait timeout after \d+ms, keys",
    "{process} did not come to a collective that the other ranks waited for",
    "see what that rank was doing in its log; if it is only slow, raise trainer.collective_timeout_s",
    symptom=True,
)
COLLECTIVE_STUCK = Cause(
    name="collective time-out",
    says="every rank came to a collective, and it did not end in time",
    remedy="look at the network between the nodes (NCCL_DEBUG=INFO in trainer.env says what it uses), or raise "
    "trainer.collective_timeout_s",
)
PEER_LOST = told(
    "peer lost",
    r"gloo.*(?:Connection reset by peer|Connection closed by peer|Broken pipe)|ncclRemoteError|ncclSystemError"
    r"|remote process exited or there was a network error|closed by remote peer|NCCL communicator was aborted"
    r"|TCPStore.*(?:Broken pipe|Connection reset|recvValue)|Heartbeat monitor timed out"
    r"|The client socket has timed out",
    "{process} was lost to the other ranks, without a word of its own",
    "most often it was killed, by the kernel for want of memory or with its node: look at the memory of the node, then "
    "at the network between the nodes",
    symptom=True,
)
SUPERVISOR_LOST = Cause(
    name="supervisor lost",
    pattern=re.compile(r"leaving: the supervisor gave no sign"),
    codes=(EXIT_FENCED,),
    says="the supervisor gave no sign any more, and every process left",
    remedy="find out what ended it: a closed terminal, a failed node or a cancelled job",
    symptom=True,
)
HANG = Cause(
    name="hang",
    says="{process} makes no progress, and others wait for it",
    remedy="see what it was doing in its log (kill -USR2 PID prints the stacks of a live process there)",
)
ERROR_BUDGET = told(
    "error budget",
    r"EnvironmentFailure: (?P<what>\d+% of the last \d+ episodes of \S+ failed.*?)(?:; saved and left|\n|$)",
    "too many episodes failed in their environment: {what}",
    "mend what the last error says; failed rollouts lie in rollouts/step_N.jsonl.zst; env.error_budget allows more",
)
GUARD = Cause(
    name="guard",
    says="the guard held the run back: {what}",
    remedy="metrics.jsonl shows the steps before; python -m prime_hpc.commands.tune {run} paused=false lets it go on, "
    "with another optimizer.lr beside it, say; once it has left, python -m prime_hpc.resume {run} after that",
)
STOPPED = Cause(name="stopped", says="the run was stopped: {reason}", remedy="nothing is wrong with the run")
UNCAUGHT = Cause(name="uncaught error", says="{process} failed: {error}", remedy="read the traceback in its log")
