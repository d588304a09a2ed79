"""The engine process, whatever samples its tokens: one socket, one policy, one application, one clean end."""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NoReturn

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from prime_hpc.cluster.role import Role
from prime_hpc.errors import InferenceFailure
from prime_hpc.inference.engine import PolicyEngine, TokenEngine
from prime_hpc.inference.host_copy import HostCopy
from prime_hpc.inference.routes import application
from prime_hpc.inference.served import served
from prime_hpc.inference.stamps import StampLog
from prime_hpc.models.fingerprint import fingerprint
from prime_hpc.transport.messages import PolicyVersion

try:
    from uvloop import run as run_loop  # comes with vLLM
except ImportError:
    from asyncio import run as run_loop

KEEP_ALIVE_S = 600
"""Longer than any step, so that a client's pooled connection is never closed under it."""
HEALTH_POLL_S = 0.5
DRAIN_S = 1
"""Time for answers in flight when the process is told to leave."""

Start = Callable[[], AbstractAsyncContextManager[tuple[TokenEngine, Starlette]]]
"""Makes a loaded engine and the application below our routes."""


def run(role: Role, start: Start) -> None:
    """Serve until SIGTERM.

    Raises:
        InferenceFailure: the engine died or holds weights that it must not serve.
    """
    signal.signal(signal.SIGTERM, _leave_while_starting)
    with contextlib.closing(bind(role.bind_host)) as listener:
        run_loop(serve(role, start, listener))


def bind(host: str) -> socket.socket:
    """A listening socket on a port that the system picks."""
    listener = socket.create_server((host, 0), backlog=2048)
    # Connections inherit it. asyncio sets it on sockets of its own only, and an answer whose head and body are two
    # writes waits 40 ms for the client's delayed acknowledgement without it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setblocking(False)
    return listener


def initial_version(role: Role) -> PolicyVersion:
    """The version of `model.path`, on the newest lineage; on one before all where the run began from other weights."""
    forks = [] if role.config.start_from.path else role.plan.forks
    return PolicyVersion(lineage=forks[-1].lineage if forks else 0, step=0)


def free_port(host: str) -> int:
    """A port that is free now, for programs that take no socket that is bound already."""
    with contextlib.closing(bind(host)) as listener:
        return listener.getsockname()[1]


async def serve(role: Role, start: Start, listener: socket.socket) -> None:
    """Start the engine, publish the address once requests are answered, and stay until told to leave."""
    async with start() as (engine, below):
        host_copy = HostCopy(role.paths.host_copy(role.process.name)) if role.config.update.chosen == "delta" else None
        model = served(role)
        policy = PolicyEngine(engine, version=initial_version(role), model=model.name,
                              fingerprint=fingerprint(Path(model.path)),
                              process=role.process.name, acks=role.paths.acks, host_copy=host_copy,
                              stamps=StampLog(role.config.inference.stamps_kept), adapters=role.config.lora.served,
                              reach=role.reach)  # fmt: skip
        await policy.start()
        server = make_server(role, application(policy, below, role.secrets.token))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve([listener]))
            tasks.create_task(publish(role, server, listener, version=policy.state().version))
            failure = await _watch(role, server, engine, policy)
    if failure:
        raise failure


class Server(uvicorn.Server):
    """Uvicorn that leaves signals to this process, which has an engine to stop after it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def leave(self) -> None:
        self.should_exit = True


def make_server(role: Role, app: ASGIApp) -> Server:
    """A server of `app` for the running loop. It leaves by SIGTERM, as far as that is meant for this process."""
    server = Server(uvicorn.Config(app, log_level=logging.WARNING, access_log=False, timeout_keep_alive=KEEP_ALIVE_S,
                                   timeout_graceful_shutdown=DRAIN_S))  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, role.on_terminate(server.leave))
    return server


async def publish(role: Role, server: Server, listener: socket.socket, **facts: str) -> None:
    """Announce the address once `server` answers there."""
    while not server.started and not server.should_exit:
        await asyncio.sleep(0.05)
    if server.started:
        port = listener.getsockname()[1]
        role.rendezvous.publish("ready", base_url=f"http://{role.advertised_host}:{port}", **facts)
        role.log.info("serving on port %d", port)


async def _watch(role: Role, server: Server, engine: TokenEngine, policy: PolicyEngine) -> InferenceFailure | None:
    """Stop the server when the engine cannot go on; returns why, once the server is told to leave."""
    while not server.should_exit:
        await asyncio.sleep(HEALTH_POLL_S)
        role.heart.progress(f"serving {policy.state().running} requests at v{policy.state().version}")
        if engine.failed or policy.failure:
            server.leave()
            return policy.failure or InferenceFailure("the engine process died; its last lines are in this log")
    return None


def _leave_while_starting(*_: object) -> NoReturn:
    """Nothing is served yet, so nothing is lost by leaving at once; an engine that starts listens to no one."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(128 + signal.SIGTERM)
