"""Frozen models as the orchestrator sees them: which engine or endpoint answers for a teacher or reference now."""

import asyncio

from prime_hpc.cluster.role import Role
from prime_hpc.config.frozen import FrozenModel
from prime_hpc.orchestrator.fleet import Engine
from prime_hpc.transport.messages import Endpoint

WATCH_S = 2.0


class FrozenModels:
    """All frozen models of a run, by name. A request that fails is tried again: there is no state to keep."""

    def __init__(self, role: Role):
        self._role = role
        self._models: dict[str, FrozenModel] = role.config.frozen
        self._engines: dict[str, list[Engine]] = {}

    @classmethod
    async def connect(cls, role: Role) -> "FrozenModels":
        """Wait until every engine of the plan has published its address."""
        frozen, timeout_s = cls(role), role.config.inference.start_timeout_s

        async def find(process: str) -> Engine:
            base_url = await asyncio.to_thread(role.rendezvous.wait, process, "base_url", timeout_s)
            return Engine(process, base_url, serving=True)

        for name, model in role.config.frozen.items():
            if model.base_url:
                frozen._engines[name] = [Engine(name, model.base_url.rstrip("/"), serving=True)]
                continue
            with role.heart.waiting(f"the engines of {name}", role.plan.serving(name)[0].name, timeout_s):
                frozen._engines[name] = await asyncio.gather(*(find(p.name) for p in role.plan.serving(name)))
        return frozen

    def pick(self, name: str) -> Engine:
        """The engine of a model with the least rollouts."""
        return min(self._engines[name], key=lambda engine: engine.load)

    def endpoint(self, name: str, engine: Engine) -> Endpoint:
        """How `engine` is asked for the model `name`."""
        model = self._models[name]
        if model.base_url is None:
            return Endpoint(base_url=engine.base_url, model=name)
        return Endpoint(base_url=engine.base_url, model=model.model or name, key_variable=model.key_variable)

    async def watch(self) -> None:
        """Follow engines that were started again to their new addresses, until cancelled."""
        ours = [e for name, engines in self._engines.items() if self._models[name].path for e in engines]
        while ours:
            await asyncio.sleep(WATCH_S)
            for engine in ours:
                record = await asyncio.to_thread(self._role.rendezvous.read, engine.name) or {}
                engine.base_url = record.get("base_url") or engine.base_url
