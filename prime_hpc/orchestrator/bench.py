"""A fleet under load: throughput, latencies, use of the KV cache and hits of the prefix cache, at set concurrencies."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from prime_hpc.cluster.files import write_json
from prime_hpc.cluster.role import Role
from prime_hpc.config.inference import InferenceBench
from prime_hpc.config.json_files import read_json
from prime_hpc.config.sections import ModelConfig
from prime_hpc.orchestrator.gauges import Gauges, read_gauges
from prime_hpc.orchestrator.offer import Shape, Target, offer

LOOK_S = 0.5
COLUMNS = {
    "concurrency": ("at once", "{:d}"),
    "requests": ("requests", "{:d}"),
    "tokens_per_s": ("tokens/s", "{:.1f}"),
    "first_token_s.p50": ("first token p50", "{:.3f} s"),
    "first_token_s.p99": ("p99", "{:.3f} s"),
    "per_token_s.p50": ("further token p50", "{:.4f} s"),
    "per_token_s.p99": ("p99", "{:.4f} s"),
    "whole_s.p50": ("answer p50", "{:.3f} s"),
    "whole_s.p99": ("p99", "{:.3f} s"),
    "kv_usage": ("KV cache", "{:.0%}"),
    "prefix_hit_rate": ("prefix hits", "{:.0%}"),
}
"""Figures by their place in the result: heading and form."""


def run(role: Role) -> None:
    """Bench the engines of the plan; figures go to `summary.json`, a table to `bench.txt`."""
    config = role.config
    timeout_s = config.inference.start_timeout_s
    with role.heart.waiting("the engines' addresses", "inference-0", timeout_s):
        urls = [role.rendezvous.wait(p.name, "base_url", timeout_s) for p in role.plan.engines()]
    targets = [Target(url, config.model.served_name, role.secrets.token) for url in urls]
    settings = config.inference.bench
    steps = len(settings.concurrency)

    def tell(level: dict[str, Any]) -> None:
        role.log.info("%d at once: %.1f tokens/s", level["concurrency"], level["tokens_per_s"])
        role.heart.progress(f"benched {level['concurrency']} at once")
        step = settings.concurrency.index(level["concurrency"]) + 1
        shown = {"step": step, "of": steps, "at once": level["concurrency"], "tokens/s": level["tokens_per_s"]}
        role.rendezvous.publish("sampling", progress=shown)

    levels = asyncio.run(measure(targets, shape_of(settings, config.model), settings, config.seed, tell))
    write_json(role.paths.summary, facts(role) | {"levels": levels})
    role.paths.bench_table.write_text(table(levels))
    role.log.info("the figures:\n%s", table(levels))
    role.mark_complete()


def shape_of(settings: InferenceBench, model: ModelConfig) -> Shape:
    """Prompts from the ordinary tokens of the model's tokenizer."""
    return Shape(settings.prompt_tokens, settings.reply_tokens, vocabulary(model), settings.shared_tokens,
                 settings.route)  # fmt: skip


def vocabulary(model: ModelConfig) -> int:
    """Ids below this are tokens of the model."""
    tokenizer = read_json(Path(model.tokenizer or model.path) / "tokenizer.json") or {}
    known = tokenizer.get("model", {}).get("vocab", ())
    return len(known) or int((read_json(Path(model.path) / "config.json") or {})["vocab_size"])


async def measure(targets: Sequence[Target], shape: Shape, settings: InferenceBench, seed: int,
                  tell: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:  # fmt: skip
    """The figures of each concurrency; `tell` gets them as they come.

    Before each, every target answers one question that is not counted.

    Raises:
        InferenceFailure: a server refused a request or failed.
    """
    levels = []
    async with httpx.AsyncClient() as http:
        for number, concurrency in enumerate(settings.concurrency, 1):
            await offer(targets, shape, concurrency=len(targets), requests=len(targets), seed=seed + number)
            watch = FleetWatch(http, targets)
            async with watch:
                level = await offer(targets, shape, concurrency=concurrency, requests=settings.rounds * concurrency,
                                    seed=seed + 1000 * number)  # fmt: skip
            levels.append(level.figures() | watch.figures())
            tell(levels[-1])
    return levels


class FleetWatch:
    """Looks at the engines' gauges while it is open."""

    def __init__(self, http: httpx.AsyncClient, targets: Sequence[Target]):
        self._http, self._targets = http, targets
        self._usage: list[float] = []

    async def __aenter__(self) -> "FleetWatch":
        self._begin = await self._read()
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        self._end = await self._read()

    def figures(self) -> dict[str, Any]:
        """`kv_usage`, the most of the fullest engine, and `prefix_hit_rate`; None where engines do not tell."""
        queries, hits = ([getattr(after, name) - getattr(before, name)
                          for before, after in zip(self._begin, self._end, strict=True) if before and after]
                         for name in ("prefix_queries", "prefix_hits"))  # fmt: skip
        return {
            "kv_usage": max(self._usage, default=None),
            "prefix_hit_rate": sum(hits) / sum(queries) if sum(queries) else None,
        }

    async def _follow(self) -> None:
        while True:
            self._usage += [gauges.kv_usage for gauges in await self._read() if gauges]
            await asyncio.sleep(LOOK_S)

    async def _read(self) -> list[Gauges | None]:
        return await asyncio.gather(*(read_gauges(self._http, t.base_url, LOOK_S * 10) for t in self._targets))


def facts(role: Role) -> dict[str, Any]:
    """What was benched."""
    settings = role.config.inference.bench
    return {
        "model": role.config.model.path,
        "engine": role.config.inference.engine,
        "replicas": role.config.inference.replicas,
        "gpus": role.plan.held_gpus,
        "route": settings.route,
        "prompt_tokens": settings.prompt_tokens,
        "shared_tokens": settings.shared_tokens,
        "reply_tokens": settings.reply_tokens,
    }


def table(levels: Sequence[dict[str, Any]]) -> str:
    """One line for each concurrency, columns set under their headings; `-` where nothing was told."""
    rows = [[heading for heading, _ in COLUMNS.values()]]
    rows += [[_cell(level, path, form) for path, (_, form) in COLUMNS.items()] for level in levels]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows) + "\n"


def _cell(level: dict[str, Any], path: str, form: str) -> str:
    value: Any = level
    for name in path.split("."):
        value = value and value.get(name)
    return "-" if value is None else form.format(value)
