"""Runs one rollout to its end: picks an engine, retries what is nobody's fault, keeps the error budget."""

import asyncio
import random
from dataclasses import asdict
from typing import Any

from prime_hpc.cluster.role import Role
from prime_hpc.config.algorithm import OPSD
from prime_hpc.config.checks import sampled_by, scored_by, source_adapter, source_algorithm, source_name
from prime_hpc.config.env import SamplingConfig, TaskSource
from prime_hpc.errors import EnvironmentFailure
from prime_hpc.orchestrator.budget import ErrorBudget
from prime_hpc.orchestrator.env_pool import EnvPool
from prime_hpc.orchestrator.fleet import Fleet
from prime_hpc.orchestrator.frozen import FrozenModels
from prime_hpc.transport.messages import Endpoint, PolicyVersion, RolloutDone, RunRollout

RETRY_PAUSE_S = 1.0
UNPROVEN_S = 60.0
"""A source none of whose episodes has ever ended well is given up after this: more likely its code is wrong than that
something it needs comes back."""


class Runner:
    """What training and evaluation share: the way of one rollout."""

    def __init__(self, role: Role, pool: EnvPool, fleet: Fleet, frozen: FrozenModels):
        self._role, self._config = role, role.config
        self._pool = pool
        self._fleet, self._frozen = fleet, frozen
        self._log = role.log
        sources = [*role.config.env.train, *role.config.env.eval.sources]
        self._sources: dict[str, TaskSource] = {source_name(s): s for s in sources}
        self._budgets = {name: ErrorBudget(name, self._config.env.error_budget, role.log) for name in self._sources}
        self.retries = 0

    async def run(self, rollout_id: str, source: str, task_index: int, version: PolicyVersion, *,
                  evaluate: bool = False) -> RolloutDone:  # fmt: skip
        """One rollout, with up to `env.retries` further tries for failures of inference or infrastructure.

        It waits while its source pauses.
        """
        budget = self._budgets[source]
        for attempt in range(self._config.env.retries + 1):
            async with budget.turn():
                done = await self._try(rollout_id, attempt, source, task_index, version, evaluate)
                budget.account(done.rollout.failure)
            failure = done.rollout.failure
            if failure is None or failure.kind == "environment":
                break
            self.retries += 1
            self._log.warning("rollout %s: %s %s: %s", rollout_id, failure.kind, failure.type, failure.message[:300])
            await asyncio.sleep(RETRY_PAUSE_S)
        done.rollout.rollout_id = rollout_id
        return done

    @property
    def paused(self) -> str | None:
        """Why a source pauses, if one does."""
        return next((budget.paused for budget in self._budgets.values() if budget.paused), None)

    @property
    def paused_too_long(self) -> EnvironmentFailure | None:
        """Why the run is to leave: a source that has paused for `pause.max_s`, or has never worked."""
        for budget in self._budgets.values():
            longest = self._config.pause.max_s if budget.proven else min(self._config.pause.max_s, UNPROVEN_S)
            if budget.paused and budget.paused_s > longest:
                never = "" if budget.proven else "; no episode of it has ever ended well"
                return EnvironmentFailure(f"{budget.paused}; saved and left after a pause of {budget.paused_s:.0f} s"
                                          f"{never}")  # fmt: skip
        return None

    def release(self) -> None:
        """The run leaves: nothing waits for the end of a pause any more."""
        for budget in self._budgets.values():
            budget.closed = True

    async def _try(self, rollout_id: str, attempt: int, source: str, task_index: int, version: PolicyVersion,
                   evaluate: bool) -> RolloutDone:  # fmt: skip
        number = rollout_id.rpartition("-")[2]
        teacher = None if evaluate else sampled_by(self._config, source)
        engine = self._frozen.pick(teacher) if teacher else await self._fleet.pick()
        adapter = source_adapter(self._config, self._sources[source])
        own = Endpoint(base_url=engine.base_url, model=adapter or self._config.model.served_name)
        sampler = self._frozen.endpoint(teacher, engine) if teacher else own
        request = RunRollout(
            rollout_id=f"{rollout_id}-{attempt}",
            task_index=task_index,
            base_url=sampler.base_url,
            model=sampler.model,
            key_variable=sampler.key_variable,
            teacher=teacher is not None,
            reference=None if evaluate else self._reference(source, own),
            version=version,
            sampling=request_sampling(self._sources[source].sampling, task_index, number),
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
        if done.rollout.failure and done.rollout.failure.kind == "inference" and teacher is None:
            self._fleet.suspect(engine)
        self._role.reach("sampling.after")
        return done

    def _reference(self, source: str, own: Endpoint) -> Endpoint | None:
        """Who scores the samples of a training source: a frozen model, the policy's own engine, or nobody."""
        if isinstance(source_algorithm(self._config, source), OPSD):
            return own
        name = scored_by(self._config, source)
        return self._frozen.endpoint(name, self._frozen.pick(name)) if name else None

    def pauses(self, source: str) -> bool:
        """Whether a source is past its error budget: then one episode at a time says whether it goes on."""
        return self._budgets[source].paused is not None


def request_sampling(sampling: SamplingConfig, task_index: int, number: str) -> dict[str, Any]:
    """The parameters of a request, of the rollout of that number of a task; what is left out is the engine's choice."""
    given = {name: value for name, value in asdict(sampling).items() if value is not None and value != []}
    if sampling.seed is not None:
        given["seed"] = random.Random(f"{sampling.seed}/{task_index}/{number}").getrandbits(31)
    return given | given.pop("extra")
