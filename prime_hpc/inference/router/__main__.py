"""The built-in router of a fleet: one address before all of its engines."""

import asyncio
import contextlib
import socket

import httpx

from prime_hpc.cluster.role import Role, main
from prime_hpc.inference.router.pool import Pool
from prime_hpc.inference.router.proxy import application
from prime_hpc.inference.server import KEEP_ALIVE_S, bind, make_server, publish

TIMEOUT = httpx.Timeout(None, connect=5.0)
"""A reply may take as long as it takes; how it is with an engine that is silent, its probes tell."""
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S / 2)


def run(role: Role) -> None:
    """Route until SIGTERM."""
    with contextlib.closing(bind(role.bind_host)) as listener:
        asyncio.run(_serve(role, listener))


async def _serve(role: Role, listener: socket.socket) -> None:
    token, names = role.secrets.token, [process.name for process in role.plan.engines()]
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        httpx.AsyncClient(timeout=TIMEOUT, limits=LIMITS) as requests,
        httpx.AsyncClient(headers=headers) as probes,
        asyncio.TaskGroup() as tasks,
    ):
        pool = Pool(lambda: {name: (role.rendezvous.read(name) or {}).get("base_url") for name in names}, probes)
        server = make_server(role, application(pool, requests, token))
        background = [tasks.create_task(pool.watch(role.heart.progress)),
                      tasks.create_task(publish(role, server, listener))]  # fmt: skip
        await server.serve([listener])
        for task in background:
            task.cancel()


if __name__ == "__main__":
    main(run, server=True)
