"""Runs one rollout to its end: picks an engine, retries what is nobody's fault, keeps the error budget."""

import asyncio
from collections import deque
from dataclasses import asdict

from prime_hpc.cluster.role import Role
from prime_hpc.config.checks import source_adapter, source_name
from prime_hpc.config.env import SourceConfig
from prime_hpc.errors import EnvironmentFailure
from prime_hpc.orchestrator.env_pool import EnvPool
from prime_hpc.orchestrator.fleet import Fleet
from prime_hpc.transport.messages import PolicyVersion, RolloutDone, RunRollout

BUDGET_WINDOW = 100
BUDGET_MINIMUM = 20
RETRY_PAUSE_S = 1.0


class Runner:
    """What training and evaluation share: the way of one rollout."""

    def __init__(self, role: Role, pool: EnvPool, fleet: Fleet):
        self._role, self._config = role, role.config
        self._pool = pool
        self._fleet = fleet
        self._log = role.log
        sources = [*role.config.env.train, *role.config.env.eval.sources]
        self._sources: dict[str, SourceConfig] = {source_name(s): s for s in sources}
        self._outcomes = {name: deque[bool](maxlen=BUDGET_WINDOW) for name in self._sources}
        self.retries = 0

    async def run(self, rollout_id: str, source: str, task_index: int, version: PolicyVersion, *,
                  evaluate: bool = False) -> RolloutDone:  # fmt: skip
        """One rollout, with up to `env.retries` further tries for failures of inference or infrastructure.

        Raises:
            EnvironmentFailure: the source has spent its error budget.
        """
        for attempt in range(self._config.env.retries + 1):
            done = await self._try(f"{rollout_id}-{attempt}", source, task_index, version, evaluate)
            failure = done.rollout.failure
            if failure is None or failure.kind == "environment":
                break
            self.retries += 1
            self._log.warning("rollout %s: %s %s: %s", rollout_id, failure.kind, failure.type, failure.message[:300])
            await asyncio.sleep(RETRY_PAUSE_S)
        done.rollout.rollout_id = rollout_id
        self._account(source, done)
        return done

    async def _try(self, rollout_id: str, source: str, task_index: int, version: PolicyVersion,
                   evaluate: bool) -> RolloutDone:  # fmt: skip
        engine = await self._fleet.pick()
        adapter = source_adapter(self._config, self._sources[source])
        request = RunRollout(
            rollout_id=rollout_id,
            task_index=task_index,
            base_url=engine.base_url,
            model=adapter or self._config.model.served_name,
            version=version,
            sampling=asdict(self._sources[source].sampling),
            evaluate=evaluate,
            time_limit_s=self._config.env.rollout_timeout_s,
            adapter=adapter,
        )
        engine.load += 1
        try:
            self._role.reach("sampling.before")
            done = await self._pool.run(source, request)
        finally:
            engine.load -= 1
        if done.rollout.failure and done.rollout.failure.kind == "inference":
            self._fleet.suspect(engine)
        self._role.reach("sampling.after")
        return done

    def _account(self, source: str, done: RolloutDone) -> None:
        failure = done.rollout.failure
        outcomes = self._outcomes[source]
        outcomes.append(failure is not None and failure.kind == "environment")
        share = sum(outcomes) / len(outcomes)
        if failure and len(outcomes) >= BUDGET_MINIMUM and share > self._config.env.error_budget:
            raise EnvironmentFailure(
                f"{share:.0%} of the last {len(outcomes)} episodes of {source} failed, more than env.error_budget = "
                f"{self._config.env.error_budget:.0%}; the last one: {failure.type}: {failure.message}"
            )
