"""A trainer rank, engines and the orchestrator's fleet around one run directory, for updates of weights in a row."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from prime_hpc.cluster import secrets
from prime_hpc.cluster.lease import LeaseKeeper
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.role import Role
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import to_dict
from prime_hpc.orchestrator.fleet import Engine, Fleet, UpdateTimes
from prime_hpc.plan.run_plan import NodeGroup, ProcessPlan, RunPlan
from prime_hpc.trainer import distributed
from prime_hpc.trainer.hf_weights import load_weights
from prime_hpc.trainer.model import PolicyModel, build_policy
from prime_hpc.trainer.weights_writer import WeightsWriter
from prime_hpc.transport.messages import PolicyVersion

REPOSITORY = Path(__file__).resolve().parents[2]
START_S = 240.0


@dataclass
class Rig:
    """`policy` is the trainer's; its single rank lives in this process, the engines in processes of their own."""

    plan: RunPlan
    policy: PolicyModel
    writer: WeightsWriter
    roles: dict[str, Role]
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)
    step: int = 0

    @property
    def paths(self) -> RunPaths:
        return RunPaths(Path(self.plan.run_dir))

    def start_engine(self, name: str) -> None:
        (self.paths.rendezvous / f"{name}.json").unlink(missing_ok=True)
        command = [*self.plan.process(name).command, str(self.paths.plan), "--process", name]
        with (self.paths.root / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT,
                                                    env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip

    def train(self, share: float = 1.0) -> PolicyVersion:
        """Change a share of the elements of every parameter, as an optimiser step would."""
        self.step += 1
        generator = torch.Generator().manual_seed(self.step)
        with torch.no_grad():
            for parameter in self.policy.parameters():
                local = parameter.to_local()
                chosen = torch.rand(local.shape, generator=generator) < share
                local.add_(torch.randn(local.shape, generator=generator) * 1e-3 * chosen)
        return PolicyVersion(0, self.step)

    async def update(self, fleet: Fleet, version: PolicyVersion) -> UpdateTimes:
        """Publish `version` while the fleet follows, as the two roles do."""
        publishing = asyncio.create_task(asyncio.to_thread(self.writer.publish, version))
        directory = self.paths.weights_version(str(version))
        while not directory.exists():
            await asyncio.sleep(0.005)
        times = await fleet.update(version, directory)
        await publishing
        return times

    def connect(self) -> Fleet:
        """The orchestrator's fleet, over engines that are up."""
        role = self.roles["orchestrator-0"]
        addresses = {p.name: role.rendezvous.wait(p.name, "base_url", START_S) for p in self.plan.engines()}
        return Fleet(role, [Engine(name, url, serving=True) for name, url in addresses.items()])

    def tensors(self) -> dict[str, torch.Tensor]:
        """The trainer's weights in Hugging Face names."""
        return {name: parameter.full_tensor().detach() for name, parameter in self.policy.named_parameters()}


@contextmanager
def rig(root: Path, model: Path, *, engine: str = "tests.fake_engine", replicas: int = 2,
        engine_args: dict[str, Any] | None = None, **update: Any) -> Iterator[Rig]:  # fmt: skip
    """Everything started but connected to nothing; `update` is that section of the configuration."""
    overrides = {
        "seq_len": 64, "model": {"path": str(model)}, "update": {"timeout_s": 120, "stall_s": 30, **update},
        "trainer": {"device": "cpu", "threads": 1, "dtype": "float32"},
        "inference": {"engine": engine, "engine_args": engine_args or {}, "replicas": replicas,
                      "start_timeout_s": START_S},
    }  # fmt: skip
    config = OmegaConf.to_container(OmegaConf.merge(to_dict(RunConfig()), overrides))
    modules = {"orchestrator-0": "prime_hpc.orchestrator", "trainer-0": "prime_hpc.trainer",
               **{f"inference-{i}": engine for i in range(replicas)}}  # fmt: skip
    processes = [ProcessPlan(name=name, component=name[:-2], index=int(name[-1]), node=0, log="",
                             command=[sys.executable, "-m", module]) for name, module in modules.items()]  # fmt: skip
    groups = [NodeGroup(name=name, first=0, nodes=1, gpus=0) for name in ("orchestrator", "inference", "trainer")]
    plan = RunPlan(name="rig", run_dir=str(root), attempt=1, nodes=1, groups=groups, forks=[], checkpoint=None,
                   processes=processes, config=config)  # fmt: skip
    paths = RunPaths(root)
    for directory in (paths.acks, paths.weights, paths.control):
        directory.mkdir(parents=True)
    paths.plan.write_bytes(plan.dump())
    secrets.create(root)
    keeper = LeaseKeeper(paths.rendezvous, 1, 60.0)
    roles = {name: Role(plan, plan.process(name)) for name in ("orchestrator-0", "trainer-0")}
    world = distributed.join(roles["trainer-0"])
    policy = build_policy(roles["trainer-0"].config, world)
    load_weights(policy, model)
    made = Rig(plan, policy, WeightsWriter(roles["trainer-0"], world, policy), roles)
    try:
        for process in plan.engines():
            made.start_engine(process.name)
        yield made
    finally:
        for process in made.processes.values():
            process.kill()
            process.wait()
        dist.destroy_process_group()
        keeper.close()


class Load:
    """Requests to every engine without a break, from threads of their own, until it ends; keeps every answer."""

    def __init__(self, fleet: Fleet, token: str, prompt: list[int], clients: int = 2, **sampling: Any):
        self.finished: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self._engines = [(e.name, e.base_url) for e in fleet.engines]
        self._headers = {"Authorization": f"Bearer {token}"}
        self._body = {"token_ids": prompt, "sampling_params": sampling}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(*engine, f"{engine[0]}.{i}"))
                         for engine in self._engines for i in range(clients)]  # fmt: skip

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, name: str, base_url: str, session: str) -> None:
        with httpx.Client(base_url=base_url, headers=self._headers, timeout=60) as client:
            for i in range(10**6):
                if self._stop.is_set():
                    break
                self._ask_once(client, f"{session}.{i}")

    def _ask_once(self, client: httpx.Client, session: str) -> None:
        reply = client.post("/inference/v1/generate", json=self._body, headers={"X-Session-ID": session})
        if reply.status_code != 200:
            self.failed.append(reply.text)
            return
        (stamp,) = client.get(f"/prime_hpc/stamps/{session}").json()["requests"]
        self.finished.append(stamp)


def steps_of(stamp: dict[str, Any]) -> list[int]:
    """Steps of the versions that sampled a reply, in order."""
    return [PolicyVersion.parse(version).step for version, _, _ in stamp["spans"]]


Act = Callable[[Rig, Fleet], Awaitable[None]]
