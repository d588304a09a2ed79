"""CPU time a token of processes that answer requests, one beside another: `python -m tools.bench_server_cost`.

    python -m tools.bench_server_cost --server ours http://localhost:8000 --server plain http://localhost:8001

Where a fast model computes in a process of its own (`VLLM_ENABLE_V1_MULTIPROCESSING=1` on a CPU), the one that answers
bounds tokens a second. Its CPU time can be compared on a machine that has other work, too: the servers are asked in
turn, and the median turn counts.
"""

import argparse
import asyncio
import os
import statistics
from dataclasses import dataclass
from typing import Any

import psutil

from prime_hpc.orchestrator.offer import Shape, Target, offer

LOADS = (("completions", 1), ("completions", 64), ("generate", 64))
"""Route and requests at once."""


@dataclass(frozen=True)
class Server:
    """A server of this machine, and the process that answers its requests."""

    name: str
    target: Target
    process: psutil.Process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--server", nargs=2, action="append", required=True, metavar=("NAME", "URL"))
    parser.add_argument("--model", default="policy", help="name of the model in requests")
    parser.add_argument("--key-variable", help="environment variable that holds the servers' key")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--reply-tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=3, help="of each client in a turn; 16 in all at least")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=30, help="prompts are made of token ids below this")
    options = parser.parse_args()
    for line in asyncio.run(measure(servers(options), options)):
        print(line)


def servers(options: argparse.Namespace) -> list[Server]:
    """Each server with the process that listens on its port."""
    key = os.environ[options.key_variable] if options.key_variable else None
    listening = {c.laddr.port: c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return [Server(name, Target(url.rstrip("/"), options.model, key),
                   psutil.Process(listening[int(url.rstrip("/").rpartition(":")[2])]))
            for name, url in options.server]  # fmt: skip


async def measure(asked: list[Server], options: argparse.Namespace) -> list[str]:
    """A line for each load and server."""
    lines = []
    for route, concurrency in LOADS:
        shape = Shape(options.prompt_tokens, options.reply_tokens, options.vocabulary, route=route)
        load: dict[str, Any] = {"concurrency": concurrency, "requests": max(16, options.requests * concurrency)}
        costs: dict[str, list[float]] = {server.name: [] for server in asked}
        for turn in range(options.turns + 1):
            for server in asked[turn % len(asked) :] + asked[: turn % len(asked)]:
                cost = await cost_us(server, shape, seed=turn, **load)
                costs[server.name] += [cost] if turn else []  # the first turn warms up
        lines += [f"{route:<12} {concurrency:>3} at once  {name:<12} {statistics.median(each):7.1f} us a token"
                  f"  ({min(each):.1f} to {max(each):.1f})" for name, each in costs.items()]  # fmt: skip
    return lines


async def cost_us(server: Server, shape: Shape, **load: Any) -> float:
    """Microseconds of user and system time that the process takes for a sampled token."""
    before = server.process.cpu_times()
    level = await offer([server.target], shape, **load)
    after = server.process.cpu_times()
    tokens = sum(timing.tokens for timing in level.timings)
    return 1e6 * (after.user + after.system - before.user - before.system) / tokens


if __name__ == "__main__":
    main()
