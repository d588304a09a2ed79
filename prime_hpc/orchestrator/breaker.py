"""Circuit breakers: a training source whose environment keeps failing rests for a while; the others go on."""

import time
from collections import deque
from collections.abc import Callable

from prime_hpc.config.env import EnvConfig
from prime_hpc.errors import EnvironmentFailure
from prime_hpc.transport.messages import Failure

WINDOW = 100
MINIMUM = 20
"""Episodes before a share means anything."""
PROBES = 4
"""Failures in a row, after a rest, that mean another."""


class Breaker:
    """One source. It opens when too many of its last episodes fail, closes at the first success after a rest."""

    def __init__(self, source: str, settings: EnvConfig, clock: Callable[[], float] = time.monotonic):
        self._source, self._settings, self._clock = source, settings, clock
        self._failed: deque[bool] = deque(maxlen=WINDOW)
        self._rest_s = settings.rest_s
        self._until = 0.0
        self._since: float | None = None
        """When it first opened, if nothing has succeeded since."""

    @property
    def resting_s(self) -> float:
        """Seconds until the source may be tried; 0 while it may."""
        return max(0.0, self._until - self._clock())

    def account(self, failure: Failure | None) -> str | None:
        """Take note of an episode that ended; what to say where that opens the breaker.

        Raises:
            EnvironmentFailure: nothing has succeeded for `env.pause_max_s` since the breaker first opened.
        """
        failed = failure is not None and failure.kind == "environment"
        self._failed.append(failed)
        if not failed:
            if failure is None and self._since is not None:
                self._since, self._rest_s = None, self._settings.rest_s
            return None
        share = sum(self._failed) / len(self._failed)
        enough = len(self._failed) >= (MINIMUM if self._since is None else PROBES)
        if self.resting_s or not enough or share <= self._settings.error_budget:
            return None
        return self._open(f"{share:.0%} of the last {len(self._failed)} episodes of {self._source} failed, more than "
                          f"env.error_budget = {self._settings.error_budget:.0%}; the last one: {failure.type}: "
                          f"{failure.message}")  # fmt: skip

    def _open(self, why: str) -> str:
        now = self._clock()
        self._since = now if self._since is None else self._since
        if now - self._since >= self._settings.pause_max_s:
            raise EnvironmentFailure(why)
        self._until, rest = now + self._rest_s, self._rest_s
        self._rest_s *= 2
        self._failed.clear()
        return f"{why}. {self._source} rests for {rest:.0f} s"
