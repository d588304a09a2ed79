"""Whose fault a failed episode is. Only an episode without a failure yields a reward."""

import asyncio
from collections.abc import Coroutine

import verifiers.v1 as vf

from prime_hpc.errors import EnvironmentFailure, InferenceFailure
from prime_hpc.transport.messages import Failure

CONTEXT_FULL = 400
"""Status of a model call that the engine refuses as such, because the conversation has outgrown the context."""
CANCEL_GRACE_S = 5.0
MESSAGE_CHARS = 2000
_KINDS = {
    "ProviderError": "inference",
    "InterceptionError": "inference",
    "TunnelError": "inference",
    "SandboxError": "infrastructure",
    "ToolsetError": "infrastructure",
}
CANCELLED = Failure(kind="infrastructure", type="Cancelled", message="the orchestrator cancelled the rollout")


class Timeout(EnvironmentFailure):
    """An episode ran past its limit."""


async def limited(episode: Coroutine[None, None, vf.Episode], seconds: float) -> vf.Episode:
    """The episode, or its cancellation once `seconds` are over. Code that shrugs off a cancellation is left behind.

    Raises:
        Timeout: the limit has passed.
    """
    task = asyncio.create_task(episode)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
        raise Timeout(f"the episode was not over after {seconds:g} s")
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_GRACE_S)


def failure_of_episode(episode: vf.Episode) -> Failure | None:
    """Why the episode has no reward; None where it ran to its end.

    A trace's own error comes before the episode's, which may only be its consequence. A model call that failed last
    counts even where the agent went on without it: what the engine did not answer is no behaviour of the policy.
    """
    for trace in episode.traces:
        if trace.is_timeout:
            name = "ScoringTimeout" if "scoring" in str(trace.stop_condition) else "Timeout"
            return Failure(kind="environment", type=name, message=f"{trace.agent.name}: {trace.stop_condition}")
        if not trace.ok and trace.errors:
            return _classify(trace.errors[-1])
        if (error := last_call_error(trace)) and error.status_code != CONTEXT_FULL:
            return _classify(error, unknown="inference")
    if not episode.ok:
        return _classify(episode.errors[-1])
    return None


def failure_of_exception(error: BaseException) -> Failure:
    """The failure that an exception outside the episode stands for."""
    kinds = {EnvironmentFailure: "environment", InferenceFailure: "inference"}
    kind = next((kind for cls, kind in kinds.items() if isinstance(error, cls)), "infrastructure")
    return Failure(kind=kind, type=type(error).__name__, message=str(error)[:MESSAGE_CHARS])


def last_call_error(trace: vf.Trace) -> vf.Error | None:
    """The error of the trace's last model call, if it failed."""
    return trace.calls[-1].error if trace.calls else None


def _classify(error: vf.Error, unknown: str = "environment") -> Failure:
    return Failure(kind=_KINDS.get(error.type, unknown), type=error.type, message=error.message[:MESSAGE_CHARS])
