"""Batches on their way to the trainer. The trainer asks, the orchestrator answers: a slow, late or restarted peer loses
nothing, since a request may be repeated and every batch is kept until a checkpoint covers it.

Two transports behind one pair of interfaces: ZMQ, and files of the run directory (`rollouts/batches/`).
"""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, cast

import zmq
import zmq.asyncio

from prime_hpc.cluster.files import list_fresh, write_atomic
from prime_hpc.cluster.role import Role
from prime_hpc.errors import DeadlineExceeded
from prime_hpc.transport import sockets
from prime_hpc.transport.messages import BatchRequest, M, Message, RankBatch, StepReport, decode_as, encode

ORCHESTRATOR, ADDRESS = "orchestrator-0", "batch_address"
REPEAT_S = 5.0
POLL_S = 0.05

Answer = Callable[[BatchRequest], Awaitable[RankBatch]]
"""The orchestrator's handler: returns the asked batch once it exists."""


class BatchSource(Protocol):
    """The trainer rank's end."""

    def receive(self, step: int, report: StepReport | None, checkpointed: int) -> RankBatch:
        """Batch `step`, or word that weights are to be written before it, waiting for either; hands over the report of
        the step before."""
        ...

    def finish(self, step: int, report: StepReport | None, checkpointed: int) -> None:
        """Hand over the last report, if there is one, after the final checkpoint."""
        ...


def open_source(role: Role, rank: int, world: int, *, asks: bool = True) -> BatchSource:
    """The batch source of data-parallel rank `rank` of `world`, by `orchestrator.transport`.

    Several processes may share a rank; over files, where they would write the same request, only one of them `asks`.
    """
    if role.config.orchestrator.transport == "files":
        return FileSource(role, rank, world, asks=asks)
    return ZmqSource(role, rank, world)


class ZmqSource:
    """Asks the orchestrator over ZMQ and repeats the question until it is answered."""

    def __init__(self, role: Role, rank: int, world: int):
        self._rank, self._world = rank, world
        self._timeout_s = role.config.batch_deadline_s
        self._role = role
        self._address = role.rendezvous.wait(ORCHESTRATOR, ADDRESS, role.config.cluster.start_timeout_s)
        self._socket = sockets.dealer(zmq.Context.instance(), role.secrets, self._address, role.process.name)
        self._told = -1
        """The step before which this rank was told to write weights."""

    def receive(self, step: int, report: StepReport | None, checkpointed: int) -> RankBatch:
        request = BatchRequest(rank=self._rank, world=self._world, step=step, checkpointed=checkpointed, report=report,
                               written=step == self._told)  # fmt: skip
        deadline = time.monotonic() + self._timeout_s
        with self._role.heart.waiting(f"batch {step}", ORCHESTRATOR, self._timeout_s):
            while time.monotonic() < deadline:
                self._socket.send_multipart(encode(request))
                reply = self._reply(step, min(deadline, time.monotonic() + REPEAT_S))
                if reply:
                    self._told = step if reply.write_weights else self._told
                    return reply
                self._follow()
        raise DeadlineExceeded(self._role.process.name, f"batch {step}", ORCHESTRATOR, self._timeout_s)

    def _reply(self, step: int, until: float) -> RankBatch | None:
        """The answer about `step`, if it comes in time; answers to repeated questions about other steps are skipped."""
        while (left := until - time.monotonic()) > 0 and self._socket.poll(int(left * 1000)):
            reply = decode_as(self._socket.recv_multipart(), RankBatch)
            if reply.step == step and not (reply.write_weights and step == self._told):
                return reply
        return None

    def _follow(self) -> None:
        """Turn to the orchestrator's new address if it was started again."""
        record = self._role.rendezvous.read(ORCHESTRATOR) or {}
        if record.get(ADDRESS) not in (None, self._address):
            self._socket.disconnect(self._address)
            self._address = record[ADDRESS]
            self._socket.connect(self._address)

    def finish(self, step: int, report: StepReport | None, checkpointed: int) -> None:
        self.receive(step + 1, report, checkpointed)


class FileSource:
    """Reads `rollouts/batches/step_N/rank_R.bin` and leaves `request_R.bin` for the orchestrator; once it has written
    weights before the step, `rank_R.written.bin` and `request_R.written.bin`."""

    def __init__(self, role: Role, rank: int, world: int, *, asks: bool):
        self._root = role.paths.batches
        self._rank, self._world, self._asks = rank, world, asks
        self._timeout_s = role.config.batch_deadline_s
        self._role = role
        self._told = -1
        """The step before which this rank was told to write weights."""

    def receive(self, step: int, report: StepReport | None, checkpointed: int) -> RankBatch:
        self._ask(step, report, checkpointed)
        directory, name = self._root / f"step_{step}", f"rank_{self._suffix(step)}"
        deadline = time.monotonic() + self._timeout_s
        with self._role.heart.waiting(f"batch {step}", ORCHESTRATOR, self._timeout_s):
            while name not in list_fresh(directory):
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(self._role.process.name, f"batch {step}", ORCHESTRATOR, self._timeout_s)
                time.sleep(POLL_S)
        reply = _read(directory / name, RankBatch)
        self._told = step if reply.write_weights else self._told
        return reply

    def finish(self, step: int, report: StepReport | None, checkpointed: int) -> None:
        self._ask(step + 1, report, checkpointed)

    def _ask(self, step: int, report: StepReport | None, checkpointed: int) -> None:
        if not self._asks:
            return
        request = BatchRequest(rank=self._rank, world=self._world, step=step, checkpointed=checkpointed, report=report,
                               written=step == self._told)  # fmt: skip
        _write(self._root / f"step_{step}" / f"request_{self._suffix(step)}", request)

    def _suffix(self, step: int) -> str:
        return f"{self._rank}.written.bin" if step == self._told else f"{self._rank}.bin"


class BatchServer(Protocol):
    """The orchestrator's end: calls `answer` for every request until it is cancelled."""

    address: str | None

    async def serve(self, answer: Answer) -> None: ...


def open_server(role: Role) -> BatchServer:
    """The orchestrator's end of `orchestrator.transport`."""
    if role.config.orchestrator.transport == "files":
        return FileServer(role.paths.batches)
    return ZmqServer(role)


class ZmqServer:
    """Answers every question in a task of its own, so that a rank that waits holds nobody up."""

    def __init__(self, role: Role):
        socket, port = sockets.router(zmq.asyncio.Context.instance(), role.secrets, role.bind_host)
        self._socket = cast(zmq.asyncio.Socket, socket)
        self.address: str | None = f"tcp://{role.advertised_host}:{port}"

    async def serve(self, answer: Answer) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                identity, *frames = await self._socket.recv_multipart()
                tasks.create_task(self._reply(identity, decode_as(frames, BatchRequest), answer))

    async def _reply(self, identity: bytes, request: BatchRequest, answer: Answer) -> None:
        await self._socket.send_multipart([identity, *encode(await answer(request))])


class FileServer:
    """Watches for request files and writes the answers beside them; older steps are removed once checkpointed."""

    address: str | None = None

    def __init__(self, root: Path):
        self._root = root

    async def serve(self, answer: Answer) -> None:
        seen: set[str] = set()
        async with asyncio.TaskGroup() as tasks:
            while True:
                asked = set(self._requests())
                for name in asked - seen:
                    tasks.create_task(self._reply(self._root / name, answer))
                seen = asked  # a step that was removed may be asked for again
                await asyncio.sleep(POLL_S)

    def _requests(self) -> list[str]:
        return [f"{step}/{name}" for step in list_fresh(self._root) for name in list_fresh(self._root / step)
                if name.startswith("request_")]  # fmt: skip

    async def _reply(self, path: Path, answer: Answer) -> None:
        request = _read(path, BatchRequest)
        batch = await answer(request)
        await asyncio.to_thread(_write, path.with_name(path.name.replace("request_", "rank_")), batch)
        for step in list_fresh(self._root):
            if int(step.removeprefix("step_")) <= request.checkpointed:
                shutil.rmtree(self._root / step, ignore_errors=True)


def _write(path: Path, message: Message) -> None:
    write_atomic(path, b"\n".join(encode(message)), durable=False)


def _read(path: Path, kind: type[M]) -> M:
    return decode_as(path.read_bytes().split(b"\n", 1), kind)
