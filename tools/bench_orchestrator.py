"""What an episode costs the orchestrator: `python -m tools.bench_orchestrator`.

The orchestrator's own parts (environment pool, runner, scheduler, journal, batch maker) on one core, against
environment servers in processes of their own that answer over the real wire with a recorded episode of 20 turns. There
is no engine and no trainer: a batch counts as trained once it is packed. Episodes last between half and one and a half
times `--seconds`; `--failing` and `--hanging` are shares of them that end in an error of their environment, or only at
their time limit. Each of the engines stands still for the share `--stalling` of every half minute, one after the other:
its episodes that would end then end together when it goes on. `late` counts answers to episodes that were given up
already, `lost` episodes that ended and are in no batch and do not wait for one.
"""

import argparse
import asyncio
import contextlib
import heapq
import logging
import multiprocessing
import os
import random
import resource
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from prime_hpc.algorithms.engine_choice import choose
from prime_hpc.algorithms.packing import pack_batch
from prime_hpc.algorithms.staleness import Lineages
from prime_hpc.cluster import secrets
from prime_hpc.cluster.role import Role
from prime_hpc.cluster.secrets import RunSecrets
from prime_hpc.config.env import SourceConfig
from prime_hpc.config.run import RunConfig
from prime_hpc.orchestrator.batches import BatchMaker
from prime_hpc.orchestrator.env_pool import EnvPool
from prime_hpc.orchestrator.fleet import Engine
from prime_hpc.orchestrator.frozen import FrozenModels
from prime_hpc.orchestrator.journal import Journal
from prime_hpc.orchestrator.runner import Runner
from prime_hpc.orchestrator.scheduler import Scheduler
from prime_hpc.orchestrator.tasks import TaskStream
from prime_hpc.plan.build import Attempt, build_plan
from prime_hpc.transport import sockets
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import (
    CancelRollout,
    Failure,
    PolicyVersion,
    Rollout,
    RolloutDone,
    RunRollout,
    Sample,
    WorkerHello,
    decode,
    encode,
)

SOURCE, TURNS, SAID, SAMPLED = "recorded", 20, 200, 100
"""Tokens of a turn: what the environment says, what the policy samples."""
ENGINES, STALL_PERIOD_S = 8, 30.0
TICK_S = 0.01
SETTLE = 100
"""Turns of the event loop after which everybody has seen what came in."""
VERSION = PolicyVersion(0, 0)


@dataclass(frozen=True)
class Load:
    """How episodes behave: mean seconds, shares that fail or reach their limit, share of time that an engine stalls."""

    seconds: float
    failing: float = 0.0
    hanging: float = 0.0
    stalling: float = 0.0

    @property
    def limit_s(self) -> float:
        """Time limit of an episode, which only those that hang reach."""
        return 3 * self.seconds

    def end(self, engine: int, due: float) -> float:
        """When an episode of `engine` ends that is due then: at the end of the engine's stall, if it is within one."""
        into = (due + engine * STALL_PERIOD_S / ENGINES) % STALL_PERIOD_S
        return due + max(0.0, self.stalling * STALL_PERIOD_S - into)


def recorded(request: RunRollout, reward: float) -> Rollout:
    """An episode of 20 turns, as an environment worker reports it."""
    mask = np.tile(np.repeat([False, True], [SAID, SAMPLED]), TURNS)
    versions = np.where(mask, VERSION.pack(), -1)
    sample = Sample(
        sample_id=f"{request.rollout_id}/0", source=SOURCE, token_ids=Array.of(np.arange(len(mask)) % 30_000, "i4"),
        mask=Array.of(mask, "bool"), logprobs=Array.of(mask * -0.5, "f4"), versions=Array.of(versions, "i8"),
    )  # fmt: skip
    return Rollout(rollout_id=request.rollout_id, source=SOURCE, task_id=str(request.task_index), samples=[sample],
                   reward=reward, num_turns=TURNS, prompt_tokens=TURNS * SAID, completion_tokens=TURNS * SAMPLED,
                   metrics={"sent": time.monotonic()})  # fmt: skip


def serve(name: str, keys: RunSecrets, address: str, capacity: int, load: Load) -> None:
    """An environment server: holds every episode for a while, then answers."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    generator = random.Random(name)
    socket = sockets.dealer(zmq.Context.instance(), keys, address, name)
    hello = WorkerHello(worker=name, source=SOURCE, capacity=capacity, num_tasks=None)
    due: list[tuple[float, int, RunRollout, str]] = []
    greeted = 0.0
    for count in range(10**12):
        if time.monotonic() - greeted > 5:
            socket.send_multipart(encode(hello))
            greeted = time.monotonic()
        if socket.poll(int(1000 * TICK_S)):
            request = decode(socket.recv_multipart())
            if isinstance(request, RunRollout):
                drawn = generator.random()
                fate = "hang" if drawn < load.hanging else "fail" if drawn < load.hanging + load.failing else "end"
                seconds = load.limit_s if fate == "hang" else load.seconds * generator.uniform(0.5, 1.5)
                end = load.end(int(request.base_url.rpartition("-")[2]), time.monotonic() + seconds)
                heapq.heappush(due, (end, count, request, fate))
            elif isinstance(request, CancelRollout):
                due = [entry for entry in due if entry[2].rollout_id != request.rollout_id]
                heapq.heapify(due)
        while due and due[0][0] <= time.monotonic():
            _, _, request, fate = heapq.heappop(due)
            socket.send_multipart(encode(_answer(name, request, fate, generator)))


def _answer(name: str, request: RunRollout, fate: str, generator: random.Random) -> RolloutDone:
    rollout = recorded(request, float(generator.random() < 0.5))
    if fate != "end":
        kind = "Timeout" if fate == "hang" else "KeyError"
        failure = Failure(kind="environment", type=kind, message=fate)
        rollout = msgspec.structs.replace(rollout, reward=None, samples=[], failure=failure)
    said = [{"role": role, "content": "x" * 400} for _ in range(TURNS) for role in ("user", "assistant")]
    return RolloutDone(worker=name, rollout=rollout, messages=msgspec.json.encode(said).decode())


class Engines:
    """A fleet that nobody asks; its addresses end in the engine's number."""

    def __init__(self) -> None:
        self._engines = [Engine(f"inference-{i}", f"http://inference-{i}", serving=True) for i in range(ENGINES)]

    async def pick(self) -> Engine:
        return choose(self._engines)

    def suspect(self, engine: Engine) -> None:
        """Nobody was asked."""


@dataclass
class Trained:
    """Versions where every batch is trained as soon as it is cut."""

    shipped: int = 0
    lead: int = 0
    served: PolicyVersion = VERSION


@dataclass
class Tally:
    """What came in."""

    delays: list[float] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    late: int = 0

    def watch(self, pool: EnvPool) -> None:
        """Note how long each answer was on its way."""
        deliver = pool._done

        def noting(done: RolloutDone) -> None:
            if done.rollout.rollout_id not in pool._pending:
                self.late += 1
                return
            self.delays.append(time.monotonic() - done.rollout.metrics["sent"])
            failure = done.rollout.failure
            self.ends[failure.type if failure else "scored"] += 1
            deliver(done)

        pool._done = noting  # type: ignore[method-assign]


def prepare(root: Path, inflight: int, batch: int, limit_s: float) -> Role:
    """The role of an orchestrator without a run around it."""
    model = root / "model"
    model.mkdir()
    (model / "config.json").write_bytes(msgspec.json.encode(SHAPE))
    config = RunConfig(seq_len=TURNS * (SAID + SAMPLED))
    config.model.path, config.env.train = str(model), [SourceConfig(id=SOURCE)]
    config.env.rollout_timeout_s = limit_s
    settings = config.orchestrator
    settings.batch_size, settings.group_size, settings.max_inflight = batch, 8, inflight
    settings.max_staleness = 10**6
    secrets.create(root)
    plan = build_plan(config, root, Attempt(), 0)
    return Role(plan, plan.process("orchestrator-0"))


async def bench(role: Role, episodes: int, servers: int, load: Load) -> dict[str, float]:
    """Sample until `episodes` have ended; figures of the second half, when all places are taken."""
    pool, tally = EnvPool(role), Tally()
    tally.watch(pool)
    capacity = -(-role.config.orchestrator.max_inflight // servers)
    context = multiprocessing.get_context("spawn")
    arguments = [(f"env-{i}", role.secrets, pool.address, capacity, load) for i in range(servers)]
    processes = [context.Process(target=serve, args=given, daemon=True) for given in arguments]
    for process in processes:
        process.start()
    maker, versions = BatchMaker(role.config, Lineages([])), Trained()
    stream = TaskStream({SOURCE: role.config.env.train[0]}, {SOURCE: None}, 0)
    runner = Runner(role, pool, Engines(), FrozenModels(role))  # type: ignore[arg-type]
    journal = Journal.start(role.paths.journal)
    scheduler = Scheduler(role, runner, stream, versions, journal, maker.informative)  # type: ignore[arg-type]
    serving = asyncio.create_task(pool.serve())
    await pool.wait_ready([SOURCE], 120)
    sampling = asyncio.create_task(scheduler.run())
    started, begun, cpu, most, batched = 0, time.monotonic(), time.process_time(), 0, 0
    while sum(tally.ends.values()) < episodes:
        async with scheduler.changed:
            await scheduler.changed.wait_for(lambda: scheduler.enough(versions.shipped + 1))
        batch = maker.make(versions.shipped + 1, scheduler.take(versions.shipped + 1))
        await asyncio.to_thread(pack_batch, batch.samples, 8, role.config)
        versions.shipped, batched = versions.shipped + 1, batched + len(batch.rollouts)
        most = max(most, scheduler.inflight)
        await scheduler.notify()
        if not started and sum(tally.ends.values()) >= episodes // 2:
            started, begun, cpu = len(tally.delays), time.monotonic(), time.process_time()
    counted, seconds, cpu = len(tally.delays) - started, time.monotonic() - begun, time.process_time() - cpu
    serving.cancel()
    for _ in range(SETTLE):
        await asyncio.sleep(0)
    waiting = sum(len(group.done) for group in [*scheduler.ready, *scheduler.open.values()])
    await scheduler.close()
    with contextlib.suppress(asyncio.CancelledError):
        await sampling
    for process in processes:
        process.kill()
    return {
        "in flight": most,
        "episodes a second": counted / seconds,
        "CPU ms an episode": 1000 * cpu / counted,
        "busy": cpu / seconds,
        "delay p99 ms": 1000 * float(np.percentile(tally.delays[started:], 99)),
        "memory MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        **{f"ended: {end}": count for end, count in tally.ends.items()},
        "late": tally.late,
        "lost": sum(tally.ends.values()) - batched - waiting,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inflight", type=int, default=4000)
    parser.add_argument("--episodes", type=int, default=16_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0, help="mean duration of an episode")
    parser.add_argument("--failing", type=float, default=0.0)
    parser.add_argument("--hanging", type=float, default=0.0)
    parser.add_argument("--stalling", type=float, default=0.0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        load = Load(options.seconds, options.failing, options.hanging, options.stalling)
        role = prepare(Path(folder), options.inflight, options.batch, load.limit_s)
        for name, value in asyncio.run(bench(role, options.episodes, options.servers, load)).items():
            print(f"{name:>24} {value:.2f}")


SHAPE = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}  # fmt: skip


if __name__ == "__main__":
    main()
