"""A trainer rank, engines and the orchestrator's fleet around one run directory, for updates of weights in a row."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from prime_hpc.orchestrator.directory import directory_of
from prime_hpc.orchestrator.fleet import Engine, Fleet, UpdateTimes
from prime_hpc.plan.run_plan import NodeGroup, ProcessPlan, RunPlan
from prime_hpc.trainer import distributed
from prime_hpc.trainer.bench import initialise
from prime_hpc.trainer.hf_weights import load_weights
from prime_hpc.trainer.model import build_policy
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.trainer.weights_writer import WeightsWriter
from prime_hpc.transport.messages import PolicyVersion
from tools.forked import Process, Start, start_afresh

START_S = PATIENCE_S = 3600.0
"""What the start of an engine and a request may take, so that a busy machine is no failure."""


class Engines:
    """Engine processes of a plan, by name."""

    def __init__(self, plan: RunPlan, start: Start):
        self._plan = plan
        self._start = start
        self._paths = RunPaths(Path(plan.run_dir))
        self.processes: dict[str, Process] = {}

    def start(self, name: str) -> None:
        """Start an engine, for the first time or again."""
        plan = self._plan.process(name)
        (self._paths.rendezvous / f"{name}.json").unlink(missing_ok=True)
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if plan.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, plan.gpus))
        command = [*plan.command, str(self._paths.plan), "--process", name]
        self.processes[name] = self._start(command, env, self._paths.root / f"{name}.log")

    def kill(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # what the engine has started, too
                process.wait()


@dataclass
class Rig:
    """`policy` is the trainer's; its single rank lives in this process, the engines in processes of their own."""

    plan: RunPlan
    world: distributed.World
    policy: PolicyModel
    writer: WeightsWriter
    roles: dict[str, Role]
    engines: Engines
    step: int = 0

    @property
    def paths(self) -> RunPaths:
        return RunPaths(Path(self.plan.run_dir))

    def switch(self, **update: Any) -> None:
        """Publish by other settings from now on."""
        for role in self.roles.values():
            for key, value in update.items():
                setattr(role.config.update, key, value)
        self.writer = WeightsWriter(self.roles["trainer-0"], self.world, self.policy)

    def train(self, share: float = 1.0) -> PolicyVersion:
        """Change a share of the elements of every parameter, so little that bfloat16 takes one step."""
        self.step += 1
        nudge(self.policy, share, self.step)
        return PolicyVersion(0, self.step)

    async def update(self, fleet: Fleet, version: PolicyVersion) -> UpdateTimes:
        """Publish `version` while the fleet follows, as the two roles do.

        Raises:
            TimeoutError: no engine serves for longer than an update may take.
        """
        publishing = asyncio.create_task(asyncio.to_thread(self.writer.publish, version))
        directory = self.paths.weights_version(str(version))
        while not directory.exists():
            await asyncio.sleep(0.005)
        async with asyncio.timeout(2 * self.roles["orchestrator-0"].config.update.timeout_s):
            times = await fleet.update(version, directory)
            while not fleet.serves:
                await asyncio.sleep(0.005)
        await publishing
        return times

    def connect(self) -> Fleet:
        """The orchestrator's fleet, over engines that are up."""
        role = self.roles["orchestrator-0"]
        directory = directory_of(role)
        addresses = directory.wait(role.config.inference.start_timeout_s)
        engines = [Engine(name, url, serving=True) for name, url in addresses.items()]
        return Fleet(role, engines, directory, self._write_whole)

    async def _write_whole(self, version: PolicyVersion) -> None:
        await asyncio.to_thread(self.writer.write_whole)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The trainer's weights in Hugging Face names."""
        return {name: parameter.full_tensor().detach() for name, parameter in self.policy.named_parameters()}


@contextmanager
def rig(
    root: Path,
    model: Path,
    *,
    replicas: int = 2,
    gpus: tuple[list[int], list[int]] | None = None,
    random: bool = False,
    inference: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    start: Start = start_afresh,
    **update: Any,
) -> Iterator[Rig]:
    """Engines and trainer, started but connected to nothing; `inference`, `trainer` and `update` are sections of the
    configuration. `gpus` are those of each engine and of the trainer, `random` leaves the files of `model` alone,
    `start` is how engines are started."""
    plan = _make_plan(root, model, replicas, gpus, inference or {}, trainer or {}, update)
    paths = RunPaths(root)
    for directory in (paths.acks, paths.weights, paths.control):
        directory.mkdir(parents=True)
    paths.plan.write_bytes(plan.dump())
    secrets.create(root)
    keeper = LeaseKeeper(paths.rendezvous, 1, 60.0)
    engines = Engines(plan, start)
    # a time limit ends this process as Ctrl-C does, so that no engine is left behind
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for process in plan.engines():
            engines.start(process.name)
        roles = {name: Role(plan, plan.process(name)) for name in ("orchestrator-0", "trainer-0")}
        world = distributed.join(roles["trainer-0"])
        policy = build_policy(roles["trainer-0"].config, world)
        if random:
            initialise(policy, seed=0)
        else:
            load_weights(policy, model)
        yield Rig(plan, world, policy, WeightsWriter(roles["trainer-0"], world, policy), roles, engines)
    finally:
        engines.kill()
        if dist.is_initialized():
            dist.destroy_process_group()
        keeper.close()
        signal.signal(signal.SIGTERM, before)


def _make_plan(root: Path, model: Path, replicas: int, gpus: tuple[list[int], list[int]] | None,
               inference: dict[str, Any], trainer: dict[str, Any], update: dict[str, Any]) -> RunPlan:  # fmt: skip
    engine_gpus, trainer_gpus = gpus or ([], [])
    overrides = {
        "seq_len": 64, "model": {"path": str(model)}, "update": {"timeout_s": 60, "stall_s": 30, **update},
        "trainer": {"device": "cuda" if gpus else "cpu", "threads": 1, **trainer},
        "inference": {"replicas": replicas, "start_timeout_s": START_S, **inference},
    }  # fmt: skip
    config = OmegaConf.to_container(OmegaConf.merge(to_dict(RunConfig()), overrides))
    modules = {"orchestrator-0": ("prime_hpc.orchestrator", []), "trainer-0": ("prime_hpc.trainer", trainer_gpus)}
    modules |= {f"inference-{i}": (config["inference"]["engine"], engine_gpus) for i in range(replicas)}
    processes = [ProcessPlan(name=name, component=name[:-2], index=int(name[-1]), node=0, log="", gpus=indices,
                             command=[sys.executable, "-m", module])
                 for name, (module, indices) in modules.items()]  # fmt: skip
    groups = [NodeGroup(name=name, first=0, nodes=1, gpus=2) for name in ("orchestrator", "inference", "trainer")]
    return RunPlan(name="rig", run_dir=str(root), attempt=1, nodes=1, groups=groups, forks=[], checkpoint=None,
                   processes=processes, config=config)  # fmt: skip


@torch.no_grad()
def nudge(policy: PolicyModel, share: float, seed: int) -> None:
    """Change a share of the elements of every parameter, so little that bfloat16 takes one step."""
    shards = [parameter.to_local() for parameter in policy.parameters()]
    generator = torch.Generator(shards[0].device).manual_seed(seed)
    for local in shards:
        chosen = torch.rand(local.shape, generator=generator, device=local.device) < share
        local.mul_(1 + 2**-7 * chosen)


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
        with httpx.Client(base_url=base_url, headers=self._headers, timeout=PATIENCE_S) as client:
            for i in range(10**6):
                if self._stop.is_set():
                    break
                self._ask_once(client, f"{session}.{i}")

    def _ask_once(self, client: httpx.Client, session: str) -> None:
        try:
            reply = client.post("/inference/v1/generate", json=self._body, headers={"X-Session-ID": session})
        except httpx.HTTPError as error:
            self.failed.append(repr(error))
            return
        if reply.status_code != 200:
            self.failed.append(reply.text)
            return
        (stamp,) = client.get(f"/prime_hpc/stamps/{session}").json()["requests"]
        self.finished.append(stamp)


def steps_of(stamp: dict[str, Any]) -> list[int]:
    """Steps of the versions that sampled a reply, in order."""
    return [PolicyVersion.parse(version).step for version, _, _ in stamp["spans"]]
