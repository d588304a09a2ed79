"""Servers of one machine asked in turn: tokens a second, and CPU time a token of the processes that answer.

    python -m tools.bench_server_cost --server ours http://localhost:8000 --server plain http://localhost:8001

Where a fast model computes in a process of its own (`VLLM_ENABLE_V1_MULTIPROCESSING=1` on a CPU), the one that answers
bounds tokens a second. Its CPU time can be compared on a machine that has other work, too: the median turn counts.
"""

import argparse
import asyncio
import os
import statistics
from dataclasses import dataclass
from typing import Any

import psutil

from prime_hpc.orchestrator.offer import Shape, Target, offer

LOADS = (("completions", 1), ("completions", 64), ("generate", 1), ("generate", 64))
"""Route and requests at once."""


@dataclass(frozen=True)
class Server:
    """A server of this machine, and the process that answers its requests."""

    name: str
    target: Target
    process: psutil.Process


@dataclass(frozen=True)
class Cost:
    """Tokens a second, and microseconds of user and system time that the process takes for a sampled token."""

    tokens_per_s: float
    us: float


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
    for number, (route, concurrency) in enumerate(LOADS):
        shape = Shape(options.prompt_tokens, options.reply_tokens, options.vocabulary, route=route)
        load: dict[str, Any] = {"concurrency": concurrency, "requests": max(16, options.requests * concurrency)}
        turns: dict[str, list[Cost]] = {server.name: [] for server in asked}
        for turn in range(options.turns + 1):
            for server in asked[turn % len(asked) :] + asked[: turn % len(asked)]:
                # no prompt comes twice, as not every server would find it in its prefix cache
                cost = await ask_in_turn(server, shape, seed=len(LOADS) * turn + number, **load)
                turns[server.name] += [cost] if turn else []  # the first turn warms up
        lines += [f"{route:<12} {concurrency:>3} at once  {name:<12} {summary(costs)}" for name, costs in turns.items()]
    return lines


def summary(costs: list[Cost]) -> str:
    """Medians, and the least and the most."""
    speeds, times = [cost.tokens_per_s for cost in costs], [cost.us for cost in costs]
    return (f"{statistics.median(speeds):9.1f} tokens/s ({min(speeds):.1f} to {max(speeds):.1f})"
            f"  {statistics.median(times):7.1f} us a token ({min(times):.1f} to {max(times):.1f})")  # fmt: skip


async def ask_in_turn(server: Server, shape: Shape, **load: Any) -> Cost:
    """What the answers to one load cost."""
    before = server.process.cpu_times()
    level = await offer([server.target], shape, **load)
    after = server.process.cpu_times()
    tokens = sum(timing.tokens for timing in level.timings)
    return Cost(tokens / level.seconds, 1e6 * (after.user + after.system - before.user - before.system) / tokens)


if __name__ == "__main__":
    main()
