"""Follows the engines' load: for the metrics of every run, and for `orchestrator.max_inflight=auto`."""

import asyncio
from collections import Counter, deque

import httpx

from prime_hpc.cluster.role import Role
from prime_hpc.orchestrator.concurrency import Load
from prime_hpc.orchestrator.env_pool import EnvPool
from prime_hpc.orchestrator.fleet import Fleet
from prime_hpc.orchestrator.gauges import Gauges, read_gauges
from prime_hpc.orchestrator.report import Metrics
from prime_hpc.orchestrator.scheduler import Scheduler
from prime_hpc.orchestrator.versions import Versions

POLL_S = 2.0
READ_S = 5.0


class LoadControl:
    """Looks at all engines again and again, and moves the scheduler's limit where it is not a number of the user's."""

    def __init__(self, role: Role, fleet: Fleet, pool: EnvPool, scheduler: Scheduler, versions: Versions):
        self._role, self._fleet, self._pool = role, fleet, pool
        self._scheduler, self._versions = scheduler, versions
        self._http = httpx.AsyncClient()
        self._before: dict[str, Gauges] = {}
        self._served = deque([versions.served] * 2, maxlen=2)
        self._completed = scheduler.completed
        self._silent: set[str] = set()
        self._started = False
        self._counts: Counter[str] = Counter()
        self._most: dict[str, float] = {}

    async def follow(self) -> None:
        """Until cancelled."""
        async with self._http:
            while True:
                await self._look()
                await asyncio.sleep(POLL_S)

    def take_metrics(self) -> Metrics:
        """What was seen and done since this was last asked; nothing where the engines do not tell."""
        if not self._most:
            return {}
        metrics = {f"engines/{name}": value for name, value in self._most.items()}
        metrics["engines/preempted"] = float(self._counts["preempted"])
        if self._follows:
            metrics |= {f"concurrency/{name}": float(self._counts[name]) for name in ("grow", "trim", "cut")}
            metrics["concurrency/limit"] = float(self._scheduler.limit)
        self._counts.clear()
        self._most.clear()
        return metrics

    @property
    def _follows(self) -> bool:
        return self._role.config.orchestrator.max_inflight == "auto"

    @property
    def _updates_preempt(self) -> bool:
        """An update that drops the KV cache preempts whatever runs, which says nothing of the load."""
        return self._role.config.mode == "rl" and self._role.config.update.kv != "keep"

    async def _look(self) -> None:
        engines = {engine.base_url: engine.name for engine in self._fleet.engines if engine.serving}
        answers = await asyncio.gather(*(read_gauges(self._http, url, READ_S) for url in engines))
        seen = {url: gauges for url, gauges in zip(engines, answers, strict=True) if gauges}
        self._name_silent({engines[url] for url in engines.keys() - seen.keys()})
        if seen:
            load = self._load(seen)
            self._note(load)
            if self._follows:
                await self._decide(load, seen)
        self._before = seen

    def _load(self, seen: dict[str, Gauges]) -> Load:
        """All engines together, against the look before."""
        counts = not self._updates_preempt or {self._versions.published, *self._served} == {self._versions.served}
        self._served.append(self._versions.served)
        preempted = sum(max(0, gauges.preemptions - before.preemptions)
                        for url, gauges in seen.items() if (before := self._before.get(url)))  # fmt: skip
        completed, self._completed = self._scheduler.completed - self._completed, self._scheduler.completed
        return Load(
            kv_usage=max(gauges.kv_usage for gauges in seen.values()),
            running=sum(gauges.running for gauges in seen.values()),
            waiting=sum(gauges.waiting for gauges in seen.values()),
            preempted=preempted if counts else 0,
            inflight=self._scheduler.inflight,
            completed=completed,
            beside=max(0, self._pool.inflight - self._scheduler.inflight),
        )

    def _note(self, load: Load) -> None:
        for name in ("kv_usage", "running", "waiting"):
            self._most[name] = max(self._most.get(name, 0.0), float(getattr(load, name)))
        self._counts["preempted"] += load.preempted

    async def _decide(self, load: Load, seen: dict[str, Gauges]) -> None:
        throttle, log = self._scheduler.throttle, self._role.log
        if not self._started:
            self._started = True
            tokens = [gauges.kv_tokens for gauges in seen.values()]
            if None not in tokens:
                throttle.restart(sum(tokens) // self._role.config.seq_len)
            log.info("begins with %d rollouts in flight; the KV caches hold %s tokens", throttle.limit, tokens)
        decision = throttle.observe(load)
        self._counts[decision] += 1
        if decision != "hold":
            log.info("%s to %d rollouts in flight: %s", decision, throttle.limit, load)
            await self._scheduler.notify()

    def _name_silent(self, names: set[str]) -> None:
        """Say once of every engine that it tells nothing, where that matters."""
        for name in sorted(names - self._silent) if self._follows else ():
            self._silent.add(name)
            stays = f"goes by the others, and stays at {self._scheduler.limit} where none tells"
            said = "%s does not tell the use of its KV cache at /metrics: max_inflight=auto %s"
            self._role.log.warning(said, name, stays)
