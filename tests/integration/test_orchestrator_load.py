"""The orchestrator's own parts against an environment server over the real wire."""

import asyncio
from pathlib import Path

from tools.bench_orchestrator import Load, bench, prepare

EPISODES = 256


def test_every_episode_that_ends_is_in_a_batch_or_waits_for_one(tmp_path: Path) -> None:
    load = Load(seconds=0.2, failing=0.2, hanging=0.1, stalling=0.01)
    role = prepare(tmp_path, inflight=64, batch=32, limit_s=load.limit_s)
    seen = asyncio.run(bench(role, EPISODES, servers=2, load=load))
    assert seen["lost"] == seen["late"] == 0
    ends = {name.removeprefix("ended: "): count for name, count in seen.items() if name.startswith("ended: ")}
    assert set(ends) == {"scored", "KeyError", "Timeout"} and sum(ends.values()) >= EPISODES
