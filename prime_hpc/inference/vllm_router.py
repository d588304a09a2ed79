"""The router of the vLLM project (package `vllm-router`) before the engines of a fleet, in place of the built-in."""

import multiprocessing
import signal
import time
from collections.abc import Mapping
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from typing import Any

import httpx

from prime_hpc.cluster.role import Role, main
from prime_hpc.errors import ConfigProblem, ConfigurationError, DeadlineExceeded, InferenceFailure
from prime_hpc.inference.protocol import SESSION_HEADER, STATE
from prime_hpc.inference.server import free_port

MODULE = "vllm_router_rs"
FOLLOW_S = 1.0


def run(role: Role) -> None:
    """Route until SIGTERM.

    Raises:
        ConfigurationError: the package is not installed.
        DeadlineExceeded: the router does not answer.
        InferenceFailure: it ended by itself.
    """
    if find_spec(MODULE) is None:
        raise ConfigurationError([ConfigProblem("inference.router", "vllm", "builtin, or the package of vllm's "
                                                "(pip install 'prime-hpc[router]')")])  # fmt: skip
    timeout_s = role.config.inference.start_timeout_s
    with role.heart.waiting("the engines' addresses", "inference-0", timeout_s):
        engines = {p.name: str(role.rendezvous.wait(p.name, "base_url", timeout_s)) for p in role.plan.engines()}
    options = settings(role.bind_host, engines)
    router = multiprocessing.get_context("spawn").Process(target=serve, args=[options], daemon=True)
    router.start()
    signal.signal(signal.SIGTERM, role.on_terminate(router.terminate))
    try:
        _follow(role, router, options["port"], engines)
    finally:
        router.kill()
    if router.exitcode not in (0, -signal.SIGTERM):
        raise InferenceFailure(f"vllm-router ended with exit code {router.exitcode}; its last lines are in this log")


def serve(options: dict[str, Any]) -> None:
    """Route requests until this process is told to end."""
    from vllm_router_rs import PolicyType, Router

    Router(policy=PolicyType.ConsistentHash, **options).start()


def settings(host: str, engines: Mapping[str, str]) -> dict[str, Any]:
    """The router's own arguments. It asks the engines whether a client's token is right, and hands it on to them."""
    return {
        "host": host,
        "port": free_port(host),
        "prometheus_host": host,
        "prometheus_port": free_port(host),
        "request_id_headers": [SESSION_HEADER.lower()],
        "worker_urls": list(engines.values()),
        "api_key_validation_urls": [f"{url}{STATE}" for url in engines.values()],
        "worker_startup_check_interval": 1,
        "health_check_interval_secs": 2,
    }


def _follow(role: Role, router: BaseProcess, port: int, engines: dict[str, str]) -> None:
    """Publish the address once the router answers; then tell it of engines that have moved, until it ends."""
    timeout_s, ready = role.config.inference.start_timeout_s, False
    deadline = time.monotonic() + timeout_s
    headers = {"Authorization": f"Bearer {role.secrets.token}"}
    with httpx.Client(base_url=f"http://{role.bind_host}:{port}", headers=headers) as http:
        while router.exitcode is None:
            if ready:
                _move(role, http, engines)
            elif _answers(http):
                ready = True
                role.rendezvous.publish("ready", base_url=f"http://{role.advertised_host}:{port}")
            elif time.monotonic() > deadline:
                raise DeadlineExceeded(role.process.name, "an answer", "vllm-router", timeout_s)
            role.heart.progress(f"routing to {len(engines)} engines" if ready else "starting")
            router.join(FOLLOW_S)


def _move(role: Role, http: httpx.Client, engines: dict[str, str]) -> None:
    for name, before in engines.items():
        now = (role.rendezvous.read(name) or {}).get("base_url")
        if now and now != before:
            http.post("/add_worker", params={"url": now}).raise_for_status()
            http.post("/remove_worker", params={"url": before})
            engines[name] = now


def _answers(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    main(run, server=True)
