"""What a replay keeps of the configuration of its run."""

from pathlib import Path

from prime_hpc.cluster.paths import RunPaths
from prime_hpc.config.schema import parse
from tools.replay import _config


def test_nothing_ends_a_replay_before_it_compares_or_writes_beside_it(tmp_path: Path) -> None:
    config = parse({"guard": {"loss": {"above": 0, "action": "stop"}}, "trainer": {"profile": {"steps": 2}}})
    replayed = _config(config, RunPaths(tmp_path), 4)
    assert (replayed.mode, replayed.guard, replayed.trainer.profile.steps) == ("replay", {}, 0)
    assert replayed.trainer.replay.until == 4
