"""One rollout's way: retries by kind of failure, and the error budget of its source."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

from prime_hpc.config.algorithm import GRPO, OPD, OPSD, AlgorithmConfig, Distillation
from prime_hpc.config.env import SourceConfig
from prime_hpc.config.frozen import FrozenModel
from prime_hpc.config.loss import PPOLoss
from prime_hpc.config.run import RunConfig
from prime_hpc.errors import EnvironmentFailure
from prime_hpc.orchestrator import budget as budget_module
from prime_hpc.orchestrator import runner as module
from prime_hpc.orchestrator.fleet import Engine
from prime_hpc.orchestrator.frozen import FrozenModels
from prime_hpc.orchestrator.runner import Runner
from prime_hpc.transport.messages import Endpoint, Failure, PolicyVersion, Rollout, RolloutDone, RunRollout


class Clock:
    """Time that passes when a test, or a pause, says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


class Pool:
    """Answers with the given kinds of failure in turn; None is a success."""

    def __init__(self, kinds: list[str | None]):
        self.kinds = kinds
        self.requests: list[RunRollout] = []

    async def run(self, source: str, request: RunRollout) -> RolloutDone:
        kind = self.kinds[len(self.requests)] if len(self.requests) < len(self.kinds) else self.kinds[-1]
        self.requests.append(request)
        failure = kind and Failure(kind=kind, type="Planted", message="as told")
        rollout = Rollout(rollout_id=request.rollout_id, source=source, task_id="t", reward=None if kind else 1.0,
                          failure=failure or None)  # fmt: skip
        return RolloutDone(worker="w", rollout=rollout)


class Engines:
    """A fleet that remembers whom it was told to suspect."""

    def __init__(self, engines: list[Engine]):
        self.engines = engines
        self.suspects: list[str] = []

    async def pick(self) -> Engine:
        return min(self.engines, key=lambda e: e.load)

    def suspect(self, engine: Engine) -> None:
        self.suspects.append(engine.name)


def make(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> tuple[Runner, list[Engine]]:
    monkeypatch.setattr(module, "RETRY_PAUSE_S", 0)
    config = RunConfig()
    config.env.train = [SourceConfig(id="words")]
    engines = [Engine("inference-0", "http://a", load=1), Engine("inference-1", "http://b")]
    role = SimpleNamespace(config=config, log=logging.getLogger("test"), reach=lambda point: None)
    return Runner(role, pool, Engines(engines), FrozenModels(role)), engines


def run(runner: Runner, rollout_id: str = "g-0") -> RolloutDone:
    return asyncio.run(runner.run(rollout_id, "words", 5, PolicyVersion(0, 3)))


def test_what_is_nobody_s_fault_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(["inference", "infrastructure", None])
    runner, engines = make(pool, monkeypatch)
    done = run(runner)
    assert done.rollout.reward == 1.0 and done.rollout.rollout_id == "g-0"
    assert [r.rollout_id for r in pool.requests] == ["g-0-0", "g-0-1", "g-0-2"]
    assert {r.base_url for r in pool.requests} == {"http://b"}, "the engine with less load"
    assert pool.requests[0].task_index == 5 and pool.requests[0].version == PolicyVersion(0, 3)
    assert [e.load for e in engines] == [1, 0] and runner.retries == 2
    assert runner._fleet.suspects == ["inference-1"], "the worker's own failure is not the engine's"


def test_retries_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(["inference"])
    done = run(make(pool, monkeypatch)[0])
    assert done.rollout.failure.kind == "inference" and done.rollout.reward is None
    assert len(pool.requests) == 3


def test_an_environment_s_failure_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(["environment"])
    assert run(make(pool, monkeypatch)[0]).rollout.failure.kind == "environment"
    assert len(pool.requests) == 1


def test_teachers_sample_and_references_score_training_rollouts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    far = FrozenModel(base_url="http://far/", model="big", key_variable="FAR_KEY")
    endpoint = Endpoint(base_url="http://far", model="big", key_variable="FAR_KEY")

    def asked(algorithm: AlgorithmConfig, ref_tau: float = 0.0, evaluate: bool = False) -> RunRollout:
        pool = Pool([None])
        runner, _ = make(pool, monkeypatch)
        runner._config.algorithm, runner._config.frozen["far"] = algorithm, far
        runner._config.loss = PPOLoss(ref_tau=ref_tau, reference="far")
        runner._frozen = asyncio.run(FrozenModels.connect(runner._role))
        asyncio.run(runner.run("g-0", "words", 5, PolicyVersion(0, 3), evaluate=evaluate))
        return pool.requests[0]

    taught = asked(Distillation(teacher="far"))
    asked_of = Endpoint(base_url=taught.base_url, model=taught.model, key_variable=taught.key_variable)
    assert (asked_of, taught.teacher, taught.reference) == (endpoint, True, None)
    for request in (asked(OPD(teacher="far")), asked(GRPO(), ref_tau=0.1)):
        assert (request.base_url, request.teacher, request.reference) == ("http://b", False, endpoint)
    assert asked(OPSD()).reference == Endpoint(base_url="http://b", model="policy")
    assert asked(GRPO()).reference is None
    evaluated = asked(Distillation(teacher="far"), evaluate=True)
    assert (evaluated.base_url, evaluated.teacher, evaluated.reference) == ("http://b", False, None)


PLANTED = [None] * 9 + ["environment"] * 11
WHY = "55% of the last 20 episodes of words failed, more than env.error_budget = 50%; the last one: Planted: as told"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Pauses between tries pass at once, on a clock of the test's."""
    clock = Clock()
    monkeypatch.setattr(budget_module, "time", clock)
    monkeypatch.setattr(budget_module, "asyncio", SimpleNamespace(Lock=asyncio.Lock, sleep=clock.sleep))
    return clock


def test_a_source_past_its_error_budget_pauses_until_an_episode_ends_well(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    runner, _ = make(Pool([*PLANTED, "environment", "infrastructure", None]), monkeypatch)
    for i in range(19):
        run(runner, f"g-{i}")
    assert (clock.now, runner.paused) == (0, None)
    run(runner, "g-19")
    assert runner.paused == WHY and runner.paused_too_long is None
    run(runner, "g-20")
    assert runner.paused == WHY and clock.now == budget_module.PROBE_S
    run(runner, "g-21")
    assert runner.paused is None
    run(runner, "g-22")
    assert clock.now == 3 * budget_module.PROBE_S, "three tries waited for their turn, one that said nothing among them"


def test_a_source_that_never_worked_is_given_up_after_a_minute(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    runner, _ = make(Pool(["environment"]), monkeypatch)
    for i in range(20):
        run(runner, f"g-{i}")
    clock.now += 60
    assert runner.paused and runner.paused_too_long is None
    clock.now += 1
    assert str(runner.paused_too_long).endswith(
        "; the last one: Planted: as told; saved and left after a pause of 61 s; no episode of it has ever ended well"
    )


def test_an_episode_at_a_time_is_tried_during_a_pause(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    runner, _ = make(Pool(PLANTED), monkeypatch)

    async def scenario() -> None:
        for i in range(20):
            await runner.run(f"g-{i}", "words", 5, PolicyVersion(0, 3))
        async with asyncio.TaskGroup() as tasks:
            for i in range(3):
                tasks.create_task(runner.run(f"h-{i}", "words", 5, PolicyVersion(0, 3)))
            await asyncio.sleep(0)
        assert clock.now == 3 * budget_module.PROBE_S
        runner.release()
        await runner.run("last", "words", 5, PolicyVersion(0, 3))
        assert clock.now == 3 * budget_module.PROBE_S, "a run that leaves waits no more"

    asyncio.run(scenario())


def test_pauses_add_up_until_a_whole_window_is_good(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    flaky = [*PLANTED, None]
    runner, _ = make(Pool([*flaky, *flaky, *[None] * 100, "environment"]), monkeypatch)
    for i in range(20):
        run(runner, f"a-{i}")
    clock.now += 400
    run(runner, "a-20")
    for i in range(20):
        run(runner, f"b-{i}")
    clock.now += 200
    failure = runner.paused_too_long
    assert isinstance(failure, EnvironmentFailure)
    assert str(failure) == f"{WHY}; saved and left after a pause of 605 s"
    for i in range(1 + 100 + 51):
        run(runner, f"c-{i}")
    clock.now += 599
    assert runner.paused.startswith("51% of the last 100 episodes") and runner.paused_too_long is None
