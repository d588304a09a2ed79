"""The error budget of a source: past it its episodes pause, and a run that has paused for too long leaves."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prime_hpc.transport.messages import Failure

WINDOW = 100
MINIMUM = 20
PROBE_S = 5.0
"""Pause before each episode that is tried during a pause."""


class ErrorBudget:
    """Environment errors among the last episodes of `source`.

    During a pause one episode after another is tried; the first without such an error ends it. Pauses add up until a
    whole window has kept within the budget.
    """

    def __init__(self, source: str, limit: float, log: logging.Logger):
        self.source, self._limit, self._log = source, limit, log
        self.paused: str | None = None
        """Why it pauses."""
        self.closed = False
        """The run leaves: what still comes is neither held back nor judged."""
        self.proven = False
        """An episode has ended without such an error."""
        self._errors = deque[bool](maxlen=WINDOW)
        self._since = self._earlier_s = 0.0
        self._probing = asyncio.Lock()

    @property
    def paused_s(self) -> float:
        """Seconds of this pause and of those that it follows too soon."""
        return self._earlier_s + (time.monotonic() - self._since if self.paused else 0.0)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """An episode may run within this context, which is entered at once unless the source pauses."""
        if not self.paused:
            yield
            return
        async with self._probing:
            if self.paused and not self.closed:
                await asyncio.sleep(PROBE_S)
            yield

    def account(self, failure: Failure | None) -> None:
        """Take in how an episode ended. What failed for another reason than the environment says nothing of it."""
        if failure and failure.kind != "environment":
            return
        self._errors.append(failure is not None)
        self.proven |= failure is None
        share = sum(self._errors) / len(self._errors)
        if self.paused and not failure:
            self._go_on()
        elif not self.paused and failure and len(self._errors) >= MINIMUM and share > self._limit:
            said = " ".join(failure.message.split())
            self.paused = (
                f"{share:.0%} of the last {len(self._errors)} episodes of {self.source} failed, more than "
                f"env.error_budget = {self._limit:.0%}; the last one: {failure.type}: {said}"
            )
            self._since = time.monotonic()
            self._log.error("pausing, since %s", self.paused)
        elif len(self._errors) == WINDOW and share <= self._limit:
            self._earlier_s = 0.0

    def _go_on(self) -> None:
        self._earlier_s = self.paused_s
        self.paused = None
        self._errors.clear()
        self._log.warning("%s goes on after %.0f s of pause", self.source, self._earlier_s)
