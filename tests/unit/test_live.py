"""What may change while a run works, and how it is written down."""

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from prime_hpc.cluster.live import Live, read_live
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.commands.tune import main, tuned
from prime_hpc.config.env import SourceConfig
from prime_hpc.config.live import LIVE, changed, take_over
from prime_hpc.config.run import RunConfig
from prime_hpc.errors import ConfigurationError
from prime_hpc.orchestrator import live as module
from prime_hpc.orchestrator.live import LiveControl
from prime_hpc.orchestrator.tasks import TaskStream
from prime_hpc.plan.build import Attempt, build_plan


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Path:
    config = RunConfig()
    config.model.path = str(tiny_model)
    config.env.train = [SourceConfig(id="words"), SourceConfig(id="games")]
    (tmp_path / "plan.json").write_bytes(build_plan(config, tmp_path, Attempt(), 0).dump())
    return tmp_path


def test_sections_that_are_held_elsewhere_see_the_new_values() -> None:
    config = RunConfig()
    config.env.train = [SourceConfig(id="words"), SourceConfig(id="games")]
    held, source = config.orchestrator, config.env.train[1]
    values = {"orchestrator.max_staleness": 2, "env.train.1.ratio": 3.5, "optimizer.lr": 1e-4}
    take_over(config, changed(config, values), list(values))
    assert (held.max_staleness, source.ratio, config.optimizer.lr) == (2, 3.5, 1e-4)


@pytest.mark.parametrize(
    "values, said",
    [
        ({"orchestrator.batch_size": 4}, "orchestrator.batch_size = 4: expected a key that may change"),
        ({"optimizer.lrr": 4}, "did you mean 'optimizer.lr'"),
        ({"optimizer.lr": -1}, "optimizer.lr = -1: expected at least 0.0"),
        ({"orchestrator.max_inflight": 2}, "orchestrator.max_inflight = 2: expected at least orchestrator.group_size"),
        ({"env.train.7.ratio": 1.0}, "env.train.7.ratio = 1.0: expected a training source below 0"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        changed(RunConfig(), values)
    assert said in str(caught.value)


def test_changes_add_up_and_bad_ones_change_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tuned(run, {"optimizer.lr": 1e-4}) == Live(values={"optimizer.lr": 1e-4})
    assert main([str(run), "paused=true", "env.train.0.ratio=2"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["paused = true", "optimizer.lr = 0.0001"]
    assert shown[-2:] == ["env.train.0.ratio = 2.0", "env.train.1.ratio = 1.0"], "those that nobody has changed, too"
    assert [line.partition(" ")[0] for line in shown[2:-2]] == list(LIVE[1:-1])
    assert main([str(run), "optimizer.lr=fast"]) == 2
    after = Live(paused=True, values={"optimizer.lr": 1e-4, "env.train.0.ratio": 2})
    assert read_live(RunPaths(run).live) == after
    assert main([str(run), "paused=false", "optimizer.lr=1e-6"]) == 0
    assert read_live(RunPaths(run).live).values["optimizer.lr"] == 1e-6


def test_a_running_orchestrator_takes_what_makes_sense_and_says_what_does_not(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig()
    config.model.path = str(tiny_model)
    config.env.train = [SourceConfig(id="words"), SourceConfig(id="games")]
    stream = TaskStream({source.id: source for source in config.env.train}, {"words": None, "games": None}, 0)
    role = SimpleNamespace(config=config, paths=RunPaths(tmp_path), log=logging.getLogger("test"))
    notified = []

    async def notify() -> None:
        notified.append(True)

    scheduler = SimpleNamespace(paused=False, notify=notify)
    control = LiveControl(role, scheduler, stream)

    async def told(text: str) -> None:
        before = len(notified)
        RunPaths(tmp_path).live.write_text(text)
        async with asyncio.timeout(10):
            while len(notified) == before and "is not what" not in caplog.text:
                await asyncio.sleep(0.01)

    async def scenario() -> None:
        following = asyncio.create_task(control.follow())
        await told('{"paused": true, "values": {"optimizer.lr": 0.5, "env.train.1.ratio": 9}}')
        assert scheduler.paused and control.lr == config.optimizer.lr == 0.5
        assert [stream.draw(1)[0] for _ in range(10)].count("games") == 9
        await told('{"values": {"optimizer.lr": -1}}')
        assert scheduler.paused and control.lr == 0.5 and "at least 0.0" in caplog.text
        await told("paused")
        following.cancel()

    monkeypatch.setattr(module, "POLL_S", 0.01)
    asyncio.run(scenario())
    assert "live.json is not what `tune` writes" in caplog.text
