"""When sources are evaluated, what a restart leaves owed, how long updates are held back, and which versions played."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from prime_hpc.cluster.role import first_cause
from prime_hpc.config.checks import find_conflicts
from prime_hpc.config.compose import compose_run
from prime_hpc.config.env import EvalSourceConfig
from prime_hpc.config.run import RunConfig
from prime_hpc.errors import ConfigurationError, DeadlineExceeded
from prime_hpc.orchestrator.evals import Evaluation, Evaluator, served_by
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import NOT_SAMPLED, PolicyVersion, Rollout, RolloutDone, Sample

V2, V4 = PolicyVersion(0, 2), PolicyVersion(0, 4)


def rollout(*versions: int) -> Rollout:
    """Of a token by each version."""
    empty = np.zeros(len(versions))
    sample = Sample(sample_id="a", source="words", token_ids=Array.of(empty, "i4"), mask=Array.of(empty, "bool"),
                    logprobs=Array.of(empty, "f4"), versions=Array.of(versions, "i8"))  # fmt: skip
    return Rollout(rollout_id="a", source="words", task_id="t", reward=1.0, samples=[sample])


class Episodes:
    """A runner whose episodes end when the test says so."""

    def __init__(self) -> None:
        self.started = Counter[str]()
        self.may_end = asyncio.Event()

    async def run(
        self, rollout_id: str, source: str, task: int, version: PolicyVersion, *, evaluate: bool
    ) -> RolloutDone:
        assert evaluate
        self.started[source] += 1
        await self.may_end.wait()
        return RolloutDone(worker="w", rollout=rollout(version.pack()))


class Bench:
    """An evaluator of `words`, and of `more` with settings of its own, at work within `async with`."""

    def __init__(self, evaluated: Mapping[str, int] | None = None, more: Mapping[str, int] | None = None,
                 episode_s: float = 600.0, **settings: object):  # fmt: skip
        self.config = RunConfig()
        self.config.env.eval.sources = [EvalSourceConfig(id="words")]
        if more is not None:
            self.config.env.eval.sources.append(EvalSourceConfig(id="more", **more))
        for key, value in settings.items():
            setattr(self.config.env.eval, key, value)
        self.config.env.rollout_timeout_s = self.config.trainer.batch_timeout_s = episode_s
        self.episodes, self.tasks = Episodes(), asyncio.TaskGroup()
        self.recorded: list[Evaluation] = []
        self.role = SimpleNamespace(config=self.config, log=logging.getLogger("test"), reach=lambda point: None,
                                    process=SimpleNamespace(name="orchestrator-0"),
                                    heart=SimpleNamespace(waiting=lambda *_: nullcontext()))  # fmt: skip
        pool = SimpleNamespace(num_tasks={"words": 3, "more": 2})
        self.evaluator = Evaluator(self.role, self.episodes, pool, self.tasks, self._record, evaluated or {})

    async def _record(self, evaluation: Evaluation) -> None:
        self.recorded.append(evaluation)

    async def __aenter__(self) -> Evaluator:
        await self.tasks.__aenter__()
        return self.evaluator

    async def __aexit__(self, *raised: object) -> None:
        await self.tasks.__aexit__(*raised)


def due(**settings: object) -> dict[int, list[str]]:
    evaluator = Bench(**settings).evaluator
    return {step: names for step in range(5) if (names := evaluator.due(step))}


def test_sources_are_due_by_steps_or_by_time_each_by_itself() -> None:
    assert due() == due(every=1, sources=[]) == due(every_s=3600.0) == {}
    assert due(every=2) == {2: ["words"], 4: ["words"]}
    assert due(every=2, more={"every": 3}) == {2: ["words"], 3: ["more"], 4: ["words"]}
    assert due(every=2, more={"every": 0}) == due(every=2)
    assert due(more={"every": 4}) == {4: ["more"]}
    assert due(every_s=1e-9) == dict.fromkeys(range(5), ["words"])


def test_what_lacks_its_last_evaluation_is_owed_at_a_start() -> None:
    def owed(step: int, evaluated: Mapping[str, int] | None = None, **settings: object) -> list[str]:
        return Bench(evaluated, {"every": 3}, **settings).evaluator.owed(step)

    assert owed(0) == owed(2, every=4) == []
    assert owed(0, at_start=True) == ["words", "more"]
    assert owed(0, {"words": 0}, at_start=True) == ["more"]
    assert owed(2, every=4, at_start=True) == [], "the base model is gone"
    assert owed(5, every=4) == ["words", "more"]
    assert owed(5, {"words": 4, "more": 0}, every=4) == ["more"]
    assert Bench({"words": 4}, {}).evaluator.missing(4) == ["more"]


def test_sources_run_side_by_side_and_one_that_still_runs_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> list[Evaluation]:
        bench = Bench(every=2, rollouts_per_task=2, more={"every": 4, "rollouts_per_task": 5})
        async with bench as evaluator:
            evaluator.start(2, V2, ["words"])
            assert evaluator.due(4) == ["more"]
            evaluator.start(4, V4, ["more"])
            await asyncio.sleep(0.01)
            assert bench.episodes.started == {"words": 3 * 2, "more": 2 * 5}
            bench.episodes.may_end.set()
            await evaluator.finish()
            assert evaluator.due(8) == ["words", "more"]
        return bench.recorded

    recorded = {each.source: each for each in asyncio.run(scenario())}
    assert [(name, each.step, len(each.rollouts)) for name, each in recorded.items()] == [
        ("words", 2, 6),
        ("more", 4, 10),
    ]
    assert recorded["more"].metrics["eval/more/version"] == 4 and recorded["more"].metrics["eval/more/mixed"] == 0
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "words is not evaluated after step 4, as its evaluation at v0.2 still runs"
    ]


def test_updates_are_held_back_until_an_evaluation_ends_or_has_had_its_time(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(hold_s: float, *, ends: bool) -> None:
        bench = Bench(hold_s=hold_s)
        async with bench as evaluator:
            evaluator.start(2, V2, ["words"])
            if ends:
                asyncio.get_running_loop().call_later(0.01, bench.episodes.may_end.set)
            await evaluator.hold(V2)
            assert len(bench.recorded) == int(ends)
            bench.episodes.may_end.set()

    asyncio.run(scenario(60.0, ends=True))
    asyncio.run(scenario(0.0, ends=False))
    assert caplog.records == []
    asyncio.run(scenario(0.01, ends=False))
    assert caplog.messages == ["the evaluation of words at v0.2 goes on under newer versions, since it has held up "
                               "updates for 0.01 s (env.eval.hold_s)"]  # fmt: skip


def test_what_is_given_up_leaves_no_figures_and_nothing_is_started_after_the_end() -> None:
    async def scenario() -> None:
        bench = Bench(every=1, more={})
        async with bench as evaluator:
            evaluator.start(2, V2, ["words"])
            evaluator.start(4, V4, ["more"])
            evaluator.cancel_where(lambda version: version == V2, "the trainer went back")
            await asyncio.sleep(0.01)
            assert evaluator.due(5) == ["words"]
            evaluator.close()
            await evaluator.finish()
            evaluator.start(6, V4, ["words"])
            await evaluator.finish()
            assert bench.recorded == []

    asyncio.run(scenario())


def test_an_evaluation_none_of_whose_episodes_ends_in_all_its_tries_fails() -> None:
    async def scenario() -> None:
        bench = Bench(episode_s=0.001)
        async with bench as evaluator:
            evaluator.start(2, V2, ["words"])

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(scenario())
    error = first_cause(raised.value)
    assert isinstance(error, DeadlineExceeded) and "episode 1 of 3 of words" in str(error)


def test_versions_that_played_are_told() -> None:
    old, new = V2.pack(), V4.pack()
    pure = served_by([rollout(NOT_SAMPLED, old, old)], V2)
    assert pure.metrics() == {"version": 2, "mixed": 0, "version/min": 2, "version/max": 2, "version/share": 1}
    mixed = served_by([rollout(NOT_SAMPLED, old, old, old), rollout(new)], V2)
    assert mixed.metrics() == {"version": 2, "mixed": 1, "version/min": 2, "version/max": 4, "version/share": 0.75}
    assert str(mixed) == "sampled by v0.2 to v0.4, 75% by v0.2"
    assert str(served_by([rollout(new)], V2)) == "sampled by v0.4, 0% by v0.2"
    assert served_by([rollout(NOT_SAMPLED)], V2).metrics() == {"version": 2, "mixed": 0}


def test_without_a_training_source_only_a_run_that_does_not_train_may_evaluate(tiny_model: Path) -> None:
    def refused(*arguments: str) -> list[str]:
        config = compose_run([f"model.path={tiny_model}", "seq_len=64", *arguments])
        return [str(problem) for problem in find_conflicts(config)]

    sources = "env.eval.sources=[{id: words}]"
    assert refused("mode=sample", sources) == []
    assert refused(sources) == [
        "env.train = []: expected at least one training source; mode=sample evaluates without any"
    ]
    assert refused("mode=sample") == [
        "env.train = []: expected at least one source, or some in env.eval.sources to evaluate alone"
    ]


def test_settings_of_a_source_are_those_of_evaluations_only(tiny_model: Path) -> None:
    def problems(*arguments: str) -> list[str]:
        with pytest.raises(ConfigurationError) as raised:
            compose_run([f"model.path={tiny_model}", *arguments])
        return [str(problem) for problem in raised.value.problems]

    wrong = "env.eval.sources=[{id: words, rollouts_per_task: 0, evry: 2}]"
    held, tasks, name = problems(wrong, "env.eval.hold_s=-1")
    assert held == "env.eval.hold_s = -1: expected at least 0.0"
    assert tasks == "env.eval.sources.0.rollouts_per_task = 0: expected at least 1"
    assert name.startswith("env.eval.sources.0.evry = 2: ") and name.endswith("did you mean 'every'?")
    [training] = problems("env.train=[{id: words, every: 2}]")
    assert training.startswith("env.train.0.every = 2: expected no such key")
