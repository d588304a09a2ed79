"""The engine process: one socket, one vLLM engine, one application, one clean end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import uvicorn

from prime_hpc.cluster.role import Role
from prime_hpc.errors import InferenceFailure
from prime_hpc.inference import arguments
from prime_hpc.transport.messages import PolicyVersion

if TYPE_CHECKING:
    from prime_hpc.inference import adapter
    from prime_hpc.inference.engine import PolicyEngine

KEEP_ALIVE_S = 600
"""Longer than any step, so that a client's pooled connection is never closed under it."""
HEALTH_POLL_S = 0.5


def run(role: Role) -> None:
    """Serve until SIGTERM.

    Raises:
        ConfigurationError: vLLM does not know an argument.
        InferenceFailure: the engine died or holds weights that it must not serve.
    """
    arguments.set_environment(role)
    signal.signal(signal.SIGTERM, _interrupt)
    with contextlib.closing(bind(role.bind_host)) as listener:
        asyncio.run(serve(role, arguments.parse(arguments.arguments(role)), listener))


def bind(host: str) -> socket.socket:
    """A listening socket on a port that the system picks."""
    listener = socket.create_server((host, 0), backlog=2048)
    listener.setblocking(False)
    return listener


def initial_version(role: Role) -> PolicyVersion:
    """The version of `model.path` on the newest lineage."""
    forks = role.plan.forks
    return PolicyVersion(lineage=forks[-1].lineage if forks else 0, step=0)


async def serve(role: Role, args: Namespace, listener: socket.socket) -> None:
    """Start vLLM, publish the address once requests are answered, and stay until told to leave."""
    from prime_hpc.inference import adapter
    from prime_hpc.inference.engine import PolicyEngine
    from prime_hpc.inference.routes import application

    async with adapter.start(args) as (engine, vllm):
        policy = PolicyEngine(engine, version=initial_version(role), model=role.config.model.served_name,
                              process=role.process.name, acks=acks_dir(role),
                              stamps_kept=role.config.inference.stamps_kept)  # fmt: skip
        await policy.start()
        server = Server(uvicorn.Config(application(policy, vllm, role.secrets.token), log_level=logging.WARNING,
                                       access_log=False, timeout_keep_alive=KEEP_ALIVE_S,
                                       timeout_graceful_shutdown=1))  # fmt: skip
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.leave)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve([listener]))
            tasks.create_task(_publish(role, server, listener.getsockname()[1], policy.state().version))
            failure = await _watch(server, engine, policy)
    if failure:
        raise failure


def acks_dir(role: Role) -> Path:
    """Where worker ranks acknowledge versions."""
    return role.paths.rendezvous / "acks"


class Server(uvicorn.Server):
    """Uvicorn that leaves signals to this process, which has an engine to stop after it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def leave(self) -> None:
        self.should_exit = True


async def _publish(role: Role, server: Server, port: int, version: str) -> None:
    while not server.started and not server.should_exit:
        await asyncio.sleep(0.05)
    if server.started:
        role.rendezvous.publish("ready", base_url=f"http://{role.advertised_host}:{port}", version=version)
        role.log.info("serving version %s on port %d", version, port)


async def _watch(server: Server, engine: adapter.Engine, policy: PolicyEngine) -> InferenceFailure | None:
    """Stop the server when the engine cannot go on; returns why, once the server is told to leave."""
    while not server.should_exit:
        await asyncio.sleep(HEALTH_POLL_S)
        if engine.failed or policy.failure:
            server.leave()
            return policy.failure or InferenceFailure("the engine process died; its last lines are in this log")
    return None


def _interrupt(*_: object) -> NoReturn:
    """While the engine starts, leave through the context managers that stop its processes."""
    raise KeyboardInterrupt
