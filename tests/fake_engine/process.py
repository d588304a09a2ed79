"""An engine process, real or fake, started by hand for a test: its run directory, its lease, calls to its routes."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from prime_hpc.cluster import secrets
from prime_hpc.cluster.lease import LeaseKeeper
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.rendezvous import Rendezvous
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import to_dict
from prime_hpc.plan.run_plan import Fork, ProcessPlan, RunPlan
from tools.forked import Start, start_afresh

NAME = "inference-0"


class EngineProcess:
    """Context manager around one engine. `env` is added to the environment; `gpus` are those of the plan.

    `nodes` has it planned on several nodes, which are all this machine.
    """

    def __init__(self, run_dir: Path, config: RunConfig, *, env: dict[str, str] | None = None,
                 gpus: list[int] | None = None, forks: list[Fork] | None = None, nodes: int = 1,
                 start: Start = start_afresh):  # fmt: skip
        self._nodes = nodes
        self._start = start
        self.paths = RunPaths(run_dir)
        self.config = config
        self._env = env or {}
        self._gpus = gpus or []
        self._forks = forks or []

    def __enter__(self) -> "EngineProcess":
        self.paths.rendezvous.mkdir(parents=True)
        self.token = secrets.create(self.paths.root).token
        self._lease = LeaseKeeper(self.paths.rendezvous, 1, self.config.cluster.lease_s)
        processes = [self._plan(rank) for rank in range(self._nodes)]
        self.paths.plan.write_bytes(RunPlan(
            name=self.paths.root.name, run_dir=str(self.paths.root), attempt=1, nodes=1, forks=self._forks,
            checkpoint=None, processes=processes, config=to_dict(self.config)).dump())  # fmt: skip
        env = {**os.environ, **self._env}
        self.process, *self.others = [self._start(plan.command, env, Path(plan.log)) for plan in processes]
        self.log = Path(processes[0].log)
        return self

    def __exit__(self, *_: object) -> None:
        self._lease.close()
        for process in (self.process, *self.others):
            if process.poll() is None:
                process.terminate()
                process.wait(30)

    def _plan(self, rank: int) -> ProcessPlan:
        name = f"{NAME}-node-{rank}" if rank else NAME
        command = [sys.executable, "-m", self.config.inference.engine, str(self.paths.plan), "--process", name]
        log = self.paths.root / ("engine.log" if rank == 0 else f"engine.{rank}.log")
        return ProcessPlan(name=name, component="inference", index=0, node=0, rank=rank, command=command, log=str(log),
                           gpus=self._gpus)  # fmt: skip

    def wait_ready(self) -> dict[str, Any]:
        """What the engine publishes once it serves."""
        reader = Rendezvous(self.paths.rendezvous, "test", 1)
        deadline = time.monotonic() + self.config.inference.start_timeout_s
        while not (record := reader.read(NAME) or {}).get("base_url"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the engine did not start:\n{self.log.read_text()[-5000:]}")
            time.sleep(0.05)
        headers = {"Authorization": f"Bearer {self.token}"}
        self.client = httpx.Client(base_url=record["base_url"], timeout=60, headers=headers)
        return record

    def post(self, route: str, body: dict[str, Any] | None = None, **headers: str) -> httpx.Response:
        return self.client.post(route, json=body or {}, headers=headers)

    def get(self, route: str) -> httpx.Response:
        return self.client.get(route)

    def generate(self, token_ids: list[int], session: str = "s", **sampling: Any) -> dict[str, Any]:
        """The single choice of a completion."""
        body = {"model": "policy", "token_ids": token_ids, "sampling_params": sampling}
        reply = self.post("/inference/v1/generate", body, **{"X-Session-ID": session})
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]

    def stamps(self, session: str) -> list[dict[str, Any]]:
        return self.get(f"/prime_hpc/stamps/{session}").json()["requests"]

    def state(self) -> dict[str, Any]:
        return self.get("/prime_hpc/state").json()
