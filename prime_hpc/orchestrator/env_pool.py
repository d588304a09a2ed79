"""The orchestrator's end of the environment workers: hands rollouts to the least busy worker, loses none."""

import asyncio
import time
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from prime_hpc.cluster.role import Role
from prime_hpc.errors import CorruptData, DeadlineExceeded
from prime_hpc.transport import sockets
from prime_hpc.transport.messages import (
    CancelRollout,
    Failure,
    Rollout,
    RolloutDone,
    RunRollout,
    WorkerHello,
    decode,
    encode,
)

WORKER_SILENT_S = 30.0
OVERTIME_S = 30.0
"""A worker has this long past a rollout's limit to answer; then the rollout counts as lost."""


@dataclass
class Worker:
    """A worker that has said hello."""

    name: str
    source: str
    capacity: int
    heard: float
    running: set[str] = field(default_factory=set)


class EnvPool:
    """All environment workers, by source."""

    def __init__(self, role: Role):
        self._socket, port = sockets.router(zmq.asyncio.Context.instance(), role.secrets, role.bind_host)
        self.address = f"tcp://{role.advertised_host}:{port}"
        self.num_tasks: dict[str, int | None] = {}
        self._log = role.log
        self._workers: dict[str, Worker] = {}
        self._pending: dict[str, asyncio.Future[RolloutDone]] = {}
        self._changed = asyncio.Condition()

    async def serve(self) -> None:
        """Receive what workers say until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_silence())
            while True:
                identity, *frames = await self._socket.recv_multipart()
                message = decode(frames)
                if isinstance(message, WorkerHello):
                    self._hello(message)
                elif isinstance(message, RolloutDone):
                    self._done(message)
                else:
                    raise CorruptData(f"{identity.decode()} sent a {type(message).__name__} to the environment pool")
                async with self._changed:
                    self._changed.notify_all()

    async def wait_ready(self, sources: list[str], timeout_s: float) -> None:
        """Return once every source has a worker.

        Raises:
            DeadlineExceeded: a source has none after `timeout_s` seconds.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: set(sources) <= set(self.num_tasks))
        except TimeoutError:
            missing = sorted(set(sources) - set(self.num_tasks))
            raise DeadlineExceeded("orchestrator-0", "a hello", f"env-{missing[0]}-0", timeout_s) from None

    async def run(self, source: str, request: RunRollout) -> RolloutDone:
        """Run a rollout on a worker of `source`, waiting for a free place; cancelling this cancels the rollout."""
        worker = await self._reserve(source, request.rollout_id)
        future = self._pending[request.rollout_id] = asyncio.get_running_loop().create_future()
        try:
            await self._send(worker.name, encode(request))
            return await asyncio.wait_for(future, request.time_limit_s + OVERTIME_S)
        except TimeoutError:
            return lost(request.rollout_id, source, worker.name, "the worker never answered")
        except asyncio.CancelledError:
            await self._send(worker.name, encode(CancelRollout(rollout_id=request.rollout_id)))
            raise
        finally:
            self._pending.pop(request.rollout_id, None)
            worker.running.discard(request.rollout_id)

    @property
    def inflight(self) -> int:
        return len(self._pending)

    async def _reserve(self, source: str, rollout_id: str) -> Worker:
        def free() -> list[Worker]:
            return [w for w in self._workers.values() if w.source == source and len(w.running) < w.capacity]

        async with self._changed:
            await self._changed.wait_for(free)
            worker = min(free(), key=lambda w: len(w.running))
            worker.running.add(rollout_id)
            return worker

    async def _send(self, worker: str, frames: list[bytes]) -> None:
        await self._socket.send_multipart([worker.encode(), *frames])

    def _hello(self, hello: WorkerHello) -> None:
        known = self._workers.get(hello.worker)
        if known is None:
            self._log.info("%s is ready: %s tasks of %s", hello.worker, hello.num_tasks or "endless", hello.source)
            known = Worker(hello.worker, hello.source, hello.capacity, time.monotonic())
            self._workers[hello.worker] = known
        elif hello.first:
            self._lose(known, "the worker was restarted")
        known.heard = time.monotonic()
        self.num_tasks[hello.source] = hello.num_tasks

    def _done(self, done: RolloutDone) -> None:
        future = self._pending.get(done.rollout.rollout_id)
        if future and not future.done():
            future.set_result(done)

    def _lose(self, worker: Worker, why: str) -> None:
        for rollout_id in list(worker.running):
            future = self._pending.get(rollout_id)
            if future and not future.done():
                future.set_result(lost(rollout_id, worker.source, worker.name, why))

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(1)
            for worker in list(self._workers.values()):
                if time.monotonic() - worker.heard > WORKER_SILENT_S:
                    self._log.warning("%s silent for %.0f s, its rollouts are lost", worker.name, WORKER_SILENT_S)
                    del self._workers[worker.name]
                    self._lose(worker, "the worker is silent")


def lost(rollout_id: str, source: str, worker: str, why: str) -> RolloutDone:
    """The outcome of a rollout whose worker is gone."""
    failure = Failure(kind="infrastructure", type="WorkerLost", message=f"{worker}: {why}")
    rollout = Rollout(rollout_id=rollout_id, source=source, task_id="", failure=failure)
    return RolloutDone(worker=worker, rollout=rollout)
