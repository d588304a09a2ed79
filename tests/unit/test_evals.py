"""When an evaluation is due, and whether one version alone was evaluated."""

import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from prime_hpc.config.checks import find_conflicts
from prime_hpc.config.compose import compose_run
from prime_hpc.config.env import SourceConfig
from prime_hpc.config.run import RunConfig
from prime_hpc.orchestrator.evals import Evaluator, is_pure
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import NOT_SAMPLED, PolicyVersion, Rollout, Sample


def make(**settings: object) -> Evaluator:
    config = RunConfig()
    config.env.eval.sources = [SourceConfig(id="words")]
    for key, value in settings.items():
        setattr(config.env.eval, key, value)
    return Evaluator(SimpleNamespace(config=config, log=logging.getLogger("test")), None, None)


def due(evaluator: Evaluator) -> list[int]:
    return [step for step in range(5) if evaluator.due(step, first=step == 0, last=step == 4)]


def test_evaluations_are_due_by_steps_or_by_time() -> None:
    assert due(make()) == [4]
    assert due(make(every=2)) == [2, 4]
    assert due(make(every=3, at_start=True)) == [0, 3, 4]
    assert due(make(every_s=3600.0)) == [4]
    assert due(make(every_s=1e-9)) == [0, 1, 2, 3, 4]
    assert due(make(every=1, sources=[])) == []


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


def test_a_rollout_is_pure_if_one_version_sampled_all_of_it() -> None:
    old, new = PolicyVersion(0, 1), PolicyVersion(0, 2)

    def rollout(*versions: int) -> Rollout:
        empty = np.zeros(len(versions))
        sample = Sample(sample_id="a", source="words", token_ids=Array.of(empty, "i4"), mask=Array.of(empty, "bool"),
                        logprobs=Array.of(empty, "f4"), versions=Array.of(versions, "i8"))  # fmt: skip
        return Rollout(rollout_id="a", source="words", task_id="t", samples=[sample])

    assert is_pure(rollout(NOT_SAMPLED, new.pack(), new.pack()), new)
    assert not is_pure(rollout(NOT_SAMPLED, old.pack(), new.pack()), new)
