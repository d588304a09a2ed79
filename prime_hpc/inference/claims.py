"""Who uses an engine that outlives runs: many may sample from it at a time, or one may change its weights."""

import time
from collections.abc import Callable

from prime_hpc.errors import EngineInUse
from prime_hpc.inference.protocol import ClaimRequest


class Claims:
    """Leases by holder. One that is not renewed ends by itself, so that a run that died holds nothing for long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._leases: dict[str, tuple[float, bool]] = {}

    def take(self, request: ClaimRequest) -> None:
        """Take, renew or, with no seconds, give up a lease.

        Raises:
            EngineInUse: another holder's lease excludes this one.
        """
        if request.seconds <= 0:
            self._leases.pop(request.holder, None)
            return
        others = self._others(request.holder)
        excluding = [holder for holder, (_, exclusive) in others.items() if exclusive or request.exclusive]
        if excluding:
            raise EngineInUse(excluding[0], others[excluding[0]][0] - self._clock())
        self._leases[request.holder] = (self._clock() + request.seconds, request.exclusive)

    def check(self, holder: str) -> None:
        """Return where `holder` may change the weights.

        Raises:
            EngineInUse: another uses the engine.
        """
        for other, (until, _) in self._others(holder).items():
            raise EngineInUse(other, until - self._clock())

    def _others(self, holder: str) -> dict[str, tuple[float, bool]]:
        """Leases of others that have not ended."""
        return {name: lease for name, lease in self._leases.items() if name != holder and lease[0] > self._clock()}
