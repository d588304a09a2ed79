"""An environment worker: runs episodes of one source at the orchestrator's word and answers each request once."""

import asyncio
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

import zmq.asyncio

from prime_hpc.cluster.role import Role
from prime_hpc.config.algorithm import OPSD
from prime_hpc.config.checks import source_algorithm, source_name
from prime_hpc.config.env import TaskSource
from prime_hpc.envs.environment import Environment, offer_token
from prime_hpc.envs.failures import CANCELLED, failure_of_exception, limited
from prime_hpc.envs.rollouts import conversation, make_rollout, policy_traces
from prime_hpc.envs.scoring import Hints, Scorer, make_encoder
from prime_hpc.envs.stamps import StampClient
from prime_hpc.envs.watchdog import Watchdog, exit_process
from prime_hpc.errors import PrimeHPCError
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

ORCHESTRATOR, ADDRESS = "orchestrator-0", "env_address"
HELLO_PERIOD_S = 5.0
TICK_S = 0.5
BLOCK_GRACE_S = 10.0
"""The event loop may stand still this much longer than an episode may last."""
LEAVE_S = 8.0
"""After SIGTERM the process is gone within this time: code that shrugs off cancellation may not hold up the end."""
STOOD_STILL = "the event loop has stood still"


def run(role: Role) -> None:
    """Load the source of this process and serve it until SIGTERM.

    Raises:
        EnvironmentFailure: the environment does not load.
    """
    config = role.config
    name, source = _source(role)
    offer_token(role.secrets.token)
    role.quieten("verifiers", "aiohttp.access")
    watchdog = Watchdog(config.env.start_timeout_s, f"loading {source.id}", exit_process(role))
    environment = Environment(name, source, config.model, config.env.scoring_timeout_s)
    watchdog.allow(config.cluster.start_timeout_s + BLOCK_GRACE_S, f"waiting for {ORCHESTRATOR}")
    address = role.rendezvous.wait(ORCHESTRATOR, ADDRESS, config.cluster.start_timeout_s)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            runner.run(Worker(role, name, environment, watchdog, address).serve())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None


def _source(role: Role) -> tuple[str, TaskSource]:
    name, env = os.environ["PRIME_HPC_SOURCE"], role.config.env
    sources = env.train if os.environ["PRIME_HPC_SOURCE_KIND"] == "train" else env.eval.sources
    return name, next(source for source in sources if source_name(source) == name)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop where it is installed."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


class Worker:
    """The running episodes and the socket to the orchestrator."""

    def __init__(self, role: Role, source: str, environment: Environment, watchdog: Watchdog, address: str):
        self._role = role
        self._source = source
        self._environment = environment
        self._watchdog = watchdog
        self._address = address
        self._seq_len = role.config.seq_len
        algorithm = source_algorithm(role.config, source)
        self._echo = algorithm.echo
        self._hints = Hints(algorithm, make_encoder(role.config.model)) if isinstance(algorithm, OPSD) else None
        self._capacity = role.config.env.rollouts_per_worker
        self._places = asyncio.Semaphore(self._capacity)
        self._stamps, self._scorer = StampClient(role.secrets.token), Scorer(role.secrets.token)
        self._running: dict[str, asyncio.Task[RolloutDone]] = {}
        self._stop = asyncio.Event()
        self._outbox: asyncio.Queue[WorkerHello | RolloutDone] = asyncio.Queue()

    async def serve(self) -> None:
        """Work until SIGTERM; what runs then is answered as cancelled."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._role.on_terminate(self._stop.set))
        await self._environment.load_renderer()
        self._watchdog.allow(self._role.config.env.rollout_timeout_s + BLOCK_GRACE_S, STOOD_STILL)
        context = zmq.asyncio.Context()
        self._socket = sockets.dealer(context, self._role.secrets, self._address, self._role.process.name)
        async with self._environment.serving(), self._stamps, self._scorer, asyncio.TaskGroup() as parts:
            serving = [parts.create_task(part()) for part in (self._receive, self._greet, self._send, self._tick)]
            self._role.rendezvous.publish("ready", num_tasks=self._environment.tasks.count)
            await self._stop.wait()
            await self._finish()
            for part in serving:
                part.cancel()
        context.destroy()

    async def _receive(self) -> None:
        while True:
            message = decode(await self._socket.recv_multipart())
            if isinstance(message, RunRollout) and message.rollout_id not in self._running:
                self._start(message)
            elif isinstance(message, CancelRollout) and message.rollout_id in self._running:
                self._running[message.rollout_id].cancel()

    async def _greet(self) -> None:
        """Say hello every few seconds, to the orchestrator's new address if it was restarted."""
        first = True
        while True:
            await self._outbox.put(WorkerHello(
                worker=self._role.process.name, source=self._source, capacity=self._capacity,
                num_tasks=self._environment.tasks.count, first=first, running=list(self._running)))  # fmt: skip
            first = False
            await asyncio.sleep(HELLO_PERIOD_S)
            record = await asyncio.to_thread(self._role.rendezvous.read, ORCHESTRATOR)
            if record and record.get(ADDRESS) not in (None, self._address):
                self._move(record[ADDRESS])

    def _move(self, address: str) -> None:
        self._role.log.info("the orchestrator has moved to %s", address)
        self._socket.disconnect(self._address)
        self._socket.connect(address)
        self._address = address

    async def _send(self) -> None:
        while True:
            await self._socket.send_multipart(encode(await self._outbox.get()))
            self._outbox.task_done()

    async def _tick(self) -> None:
        while True:
            self._watchdog.beat()
            self._role.heart.progress(f"running {len(self._running)} episodes")
            await asyncio.sleep(TICK_S)

    async def _finish(self) -> None:
        leave = threading.Timer(LEAVE_S, os._exit, args=[0])
        leave.daemon = True
        leave.start()
        for task in self._running.values():
            task.cancel()
        if self._running:
            await asyncio.wait(self._running.values())
        await self._outbox.join()

    def _start(self, request: RunRollout) -> None:
        task = asyncio.create_task(self._run(request))
        self._running[request.rollout_id] = task
        task.add_done_callback(partial(self._answer, request))
        self._watchdog.allow(request.time_limit_s + BLOCK_GRACE_S, STOOD_STILL)

    async def _run(self, request: RunRollout) -> RolloutDone:
        """One episode, from its task to its rollout."""
        async with self._places:
            began = time.monotonic()
            self._role.reach("sampling.before")
            episode = await limited(self._environment.run(request), request.time_limit_s)
            self._role.reach("sampling.during")
            traces = policy_traces(episode, request.model) if episode.ok else []
            stamps = {t.id: [] if request.teacher else await self._stamps.fetch(request.base_url, t.id) for t in traces}
            seconds = time.monotonic() - began
            self._role.reach("sampling.after")
            rollout = make_rollout(request, self._source, episode, stamps, self._seq_len, seconds, self._echo)
            if request.reference and rollout.samples:
                hint = self._hints.of(traces[0]) if self._hints else []
                await self._scorer.add(rollout.samples, request.reference, hint, str(request.version))
            said = conversation(episode, request.model)
            return RolloutDone(worker=self._role.process.name, rollout=rollout, **said)

    def _answer(self, request: RunRollout, task: asyncio.Task[RolloutDone]) -> None:
        del self._running[request.rollout_id]
        if task.cancelled():
            self._outbox.put_nowait(self._failed(request, CANCELLED))
        elif error := task.exception():
            if not isinstance(error, PrimeHPCError):
                self._role.log.error("rollout %s", request.rollout_id, exc_info=error)
            self._outbox.put_nowait(self._failed(request, failure_of_exception(error)))
        else:
            self._outbox.put_nowait(task.result())

    def _failed(self, request: RunRollout, failure: Failure) -> RolloutDone:
        rollout = Rollout(rollout_id=request.rollout_id, source=self._source, task_id=str(request.task_index),
                          failure=failure)  # fmt: skip
        return RolloutDone(worker=self._role.process.name, rollout=rollout)
