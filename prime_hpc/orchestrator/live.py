"""Changes while the run works: reads them, checks them, puts them in force, and logs each one."""

import asyncio
import time

from prime_hpc.cluster import control
from prime_hpc.cluster.live import Live, read_live
from prime_hpc.cluster.role import Role
from prime_hpc.config.live import changed, take_over
from prime_hpc.errors import ConfigurationError, CorruptData
from prime_hpc.observe.guard import NAME
from prime_hpc.orchestrator.scheduler import Scheduler
from prime_hpc.orchestrator.tasks import TaskStream

POLL_S = 1.0


class LiveControl:
    """Follows `live.json`. The learning rate reaches the trainer with the batches."""

    def __init__(self, role: Role, scheduler: Scheduler, stream: TaskStream):
        self._role, self._scheduler, self._stream = role, scheduler, stream
        self._seen = self._read_before = Live()
        """What is in force, and what the file said last."""
        self._held_since: float | None = None
        """Since when the guard has held the run back, until it was asked to leave for that."""

    async def follow(self) -> None:
        """Until cancelled."""
        while True:
            live = await asyncio.to_thread(self._read)
            if live != self._read_before:
                self._read_before = live
                self._apply(live)
                await self._scheduler.notify()
            self._leave_in_time()
            await asyncio.sleep(POLL_S)

    def _read(self) -> Live:
        """What the file says now; what it said before where it makes no sense."""
        try:
            return read_live(self._role.paths.live)
        except CorruptData as error:
            self._role.log.error("%s", error)
            return self._read_before

    @property
    def lr(self) -> float | None:
        """The learning rate in force, where it was changed."""
        return self._role.config.optimizer.lr if "optimizer.lr" in self._seen.values else None

    def _leave_in_time(self) -> None:
        """Have a run that the guard has held back for `pause.max_s` save and leave."""
        longest = self._role.config.pause.max_s
        if self._held_since is None or time.monotonic() - self._held_since < longest:
            return
        self._held_since = None
        why = f"{self._seen.why}; nobody let it go on within {longest:.0f} s"
        control.ask(self._role.paths.control, "drain", why, by=NAME)

    def _apply(self, live: Live) -> None:
        """Put `live` in force, or say why not and leave everything as it is."""
        config = self._role.config
        news = {key: value for key, value in live.values.items() if self._seen.values.get(key) != value}
        try:
            take_over(config, changed(config, news), list(news))
        except ConfigurationError as error:
            self._role.log.error("%s is not taken: %s", self._role.paths.live.name, error)
            return
        if news:
            self._role.log.info("changed while running: %s", ", ".join(f"{k} = {v!r}" for k, v in news.items()))
        if live.paused != self._scheduler.paused:
            why = f", since {live.why}" if live.why else ""
            self._role.log.info("sampling is paused%s" if live.paused else "sampling goes on%s", why)
            self._held_since = time.monotonic() if live.paused and live.why else None
        self._seen, self._scheduler.paused = live, live.paused
        self._stream.set_ratios(config.env.train)
