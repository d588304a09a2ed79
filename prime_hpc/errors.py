"""Typed errors: what failed decides who may retry it, and none of them ever becomes a reward."""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any


class PrimeHPCError(Exception):
    """Base of every error this product raises on purpose; its text says what to do next."""

    restartable = True
    """Whether a process that ends by this error may do better when it is started again."""


@dataclass(frozen=True)
class ConfigProblem:
    """One mistake in a configuration: the key, its value, what was expected and the nearest valid name."""

    key: str
    value: Any
    expected: str
    nearest: str | None = None

    def __str__(self) -> str:
        hint = f"; did you mean {self.nearest!r}?" if self.nearest else ""
        return f"{self.key} = {self.value!r}: expected {self.expected}{hint}"


class ConfigurationError(PrimeHPCError):
    """The configuration cannot run. Holds every problem found, so that all are mended at once; `advice` is on all."""

    restartable = False
    place = "configuration"

    def __init__(self, problems: list[ConfigProblem], advice: str = ""):
        self.problems = problems
        lines = "\n".join([*(f"  {p}" for p in problems), *filter(None, [advice])])
        super().__init__(f"{len(problems)} problem{'s' * (len(problems) != 1)} in the {self.place}:\n{lines}")


class CommandLineError(ConfigurationError):
    """Arguments of a command that it cannot follow; the keys of its problems are those arguments."""

    place = "command line"


class EnvironmentFailure(PrimeHPCError):
    """An environment raised, timed out or returned no usable reward."""

    restartable = False


class InferenceFailure(PrimeHPCError):
    """An engine refused, failed or lost a request."""


class EngineInUse(InferenceFailure):
    """An engine that several runs may attach to is held by another one."""

    def __init__(self, holder: str, seconds: float):
        super().__init__(f"{holder} uses this engine: wait for that run to end, or start another fleet")
        self.holder = holder
        self.seconds = seconds
        """Left of its claim, unless it is renewed."""


class InfrastructureFailure(PrimeHPCError):
    """A process, socket, disk or peer failed; the work itself is not to blame."""


class NodesLost(InfrastructureFailure):
    """Nodes of a job are gone or not fit, so that the run cannot go on there; in another start of it, it may."""


class SchemaMismatch(InfrastructureFailure):
    """A message or file of a schema version this process does not speak."""

    restartable = False


class CorruptData(InfrastructureFailure):
    """A checkpoint, weights file or journal whose checksum or structure does not match."""


class DeadlineExceeded(InfrastructureFailure):
    """A named wait ran past its deadline."""

    def __init__(self, waiter: str, wanted: str, owner: str, seconds: float):
        super().__init__(f"{waiter} waited {seconds:.0f} s for {wanted} from {owner}; see the log of {owner}")


def nearest_name(name: str, valid: list[str], likeness: float = 0.6) -> str | None:
    """The valid name closest to a mistyped one, or the first that it is the begin of, or None."""
    matches = get_close_matches(name, valid, n=1, cutoff=likeness)
    longer = [known for known in valid if name and known.startswith(name)]
    return next(iter(matches + longer), None)
