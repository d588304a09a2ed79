"""The bench of engines: its figures, its prompts, its table, and what it refuses."""

import asyncio
import itertools
import os
import time
from argparse import Namespace

import pytest
from aiohttp import web

from prime_hpc.config.checks import find_conflicts
from prime_hpc.config.run import RunConfig
from prime_hpc.orchestrator.bench import table
from prime_hpc.orchestrator.offer import Level, Shape, Timing, percentiles, prompts
from tools.bench_inference import ratios
from tools.bench_server_cost import ask_in_turn, servers


def test_figures_of_a_level() -> None:
    figures = Level(2, [Timing(5, 0.5, 2.5), Timing(3, 1.5, 2.0), Timing(1, 1.0, 1.0)], 4.0).figures()
    assert (figures["requests"], figures["tokens_per_s"], figures["requests_per_s"]) == (3, 9 / 4, 3 / 4)
    assert figures["first_token_s"]["p50"] == 1.0
    assert figures["per_token_s"] == pytest.approx({"p50": 0.375, "p90": 0.475, "p99": 0.4975})
    assert figures["whole_s"]["p50"] == 2.0
    assert Level(1, [Timing(5, None, 2.0)], 2.0).figures()["first_token_s"] is None
    assert percentiles([]) is None


def test_prompts_share_a_head_and_nothing_else() -> None:
    shape = Shape(prompt=20, reply=4, vocabulary=1000, shared=8)
    one, two = (list(itertools.islice(prompts(shape, seed), 3)) for seed in (1, 2))
    assert one == list(itertools.islice(prompts(shape, 1), 3))
    assert len({tuple(prompt[:8]) for prompt in one + two}) == 1
    assert len({tuple(prompt[8:]) for prompt in one + two}) == 6
    assert {len(prompt) for prompt in one} == {20} and max(map(max, one)) < 1000


def test_the_table_has_a_line_for_each_level_and_gaps_where_nothing_was_told() -> None:
    level = Level(8, [Timing(5, None, 2.0)], 2.0).figures() | {"kv_usage": 0.5, "prefix_hit_rate": None}
    heading, line = table([level]).splitlines()
    assert heading.split()[:4] == ["at", "once", "requests", "tokens/s"]
    assert line.split() == ["8", "1", "2.5", "-", "-", "-", "-", "2.000", "s", "2.000", "s", "50%", "-"]


def test_servers_are_compared_where_both_were_measured() -> None:
    levels = [{"concurrency": n, "tokens_per_s": 30.0} for n in (1, 8)]
    assert ratios(levels, [{"concurrency": 8, "tokens_per_s": 20.0}]) == ["8 at once: 1.500 x"]


def test_the_cost_of_a_token_is_the_cpu_time_of_the_process_that_answers() -> None:
    work_s, tokens = 0.05, 4

    async def answer(_: web.Request) -> web.Response:
        end = time.process_time() + work_s
        while time.process_time() < end:
            pass
        return web.json_response({"choices": [{"token_ids": [1] * tokens}]})

    async def ask() -> tuple[int, float]:
        app = web.Application()
        app.add_routes([web.post("/inference/v1/generate", answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        [server] = servers(Namespace(server=[("this", url)], model="policy", key_variable=None))
        cost = await ask_in_turn(server, Shape(4, tokens, 10, route="generate"), seed=0, concurrency=2, requests=4)
        await runner.cleanup()
        return server.process.pid, cost

    pid, cost = asyncio.run(ask())
    assert pid == os.getpid()
    assert cost.us >= 0.8e6 * work_s / tokens, "the kernel counts in steps of a hundredth of a second"


def test_prompts_that_do_not_fit_are_refused() -> None:
    config = RunConfig(mode="bench_inference", seq_len=64)
    bench = config.inference.bench
    bench.prompt_tokens, bench.shared_tokens, bench.reply_tokens = 60, 61, 16
    found = {p.key: p.expected for p in find_conflicts(config) if p.key.startswith("inference.bench")}
    assert found == {
        "inference.bench.prompt_tokens": "at most 48, so that prompt and reply together fit into seq_len",
        "inference.bench.shared_tokens": "at most inference.bench.prompt_tokens = 60",
    }
