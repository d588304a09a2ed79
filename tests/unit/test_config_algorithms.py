"""Every choice of a loss and of an algorithm composes; combinations that cannot work are named."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from prime_hpc.config.algorithm import OPD, OPSD, CustomAlgorithm
from prime_hpc.config.checks import find_conflicts, source_algorithm
from prime_hpc.config.compose import conf_dir, options
from prime_hpc.config.curriculum import DifficultyPools, Pool
from prime_hpc.config.env import SamplingConfig, SourceConfig
from prime_hpc.config.frozen import FrozenModel
from prime_hpc.config.loss import CustomLoss, ImportanceLoss, PPOLoss
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import parse

NEEDED = {
    "loss=custom": "loss.import_path=my.loss",
    "algorithm=custom": "algorithm.import_path=my.algorithm",
    "algorithm=hierarchical_grpo": "algorithm.episode_agents=[solver]",
    "algorithm=opd": "algorithm.teacher=big",
    "algorithm=sft": "algorithm.teacher=big",
}


def composed(*overrides: str) -> RunConfig:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return parse(OmegaConf.to_container(compose("run", list(overrides)), resolve=True))


@pytest.mark.parametrize("choice", [f"{group}={name}" for group in ("loss", "algorithm")
                                    for name in options(group, [conf_dir()])])  # fmt: skip
def test_every_choice_composes(choice: str) -> None:
    config = composed(choice, *([f"++{NEEDED[choice]}"] if choice in NEEDED else []))
    name = choice.partition("=")[2]
    assert config.loss.name == name or config.algorithm.name == name or name in PRESETS


PRESETS = ("grpo_std", "echo", "grpo", "dapo", "dr_grpo", "aipo", "cispo", "tis", "mis", "icepop")
"""Choices that set the keys of another name."""


def test_presets_set_what_their_papers_set() -> None:
    assert composed("loss=dapo").loss == PPOLoss(clip_low=0.2, clip_high=0.28)
    assert composed("loss=grpo").loss == PPOLoss(normalise="sequence")
    assert composed("loss=dr_grpo").loss.length == RunConfig().seq_len
    assert composed("loss=dr_grpo", "++seq_len=512").loss == PPOLoss(normalise="length", length=512)
    assert composed("loss=icepop").loss == ImportanceLoss(bound="mask", low=0.5, high=5.0)
    assert composed("loss=mis").loss == ImportanceLoss(level="sequence", bound="mask", high=2.0)


def conflicts(config: RunConfig, prefix: str | tuple[str, ...]) -> list[str]:
    return [str(problem) for problem in find_conflicts(config) if problem.key.startswith(prefix)]


def test_losses_that_cannot_work_are_named() -> None:
    config = RunConfig(loss=PPOLoss(normalise="length", ref_tau=0.1))
    assert conflicts(config, "loss") == [
        "loss.length = None: expected tokens that every sequence counts for, since loss.normalise=length",
        "loss.reference = None: expected the name of a model under `frozen`, as loss.ref_tau > 0",
    ]


def test_teachers_must_exist_and_score_what_was_sampled() -> None:
    config = RunConfig(algorithm=OPD(teacher="bug"), frozen={"big": FrozenModel(base_url="http://a", model="m")})
    config.env.train = [SourceConfig(id="words", sampling=SamplingConfig(temperature=0.7))]
    assert conflicts(config, "algorithm") == [
        "algorithm.teacher = 'bug': expected the name of a model under `frozen`; did you mean 'big'?",
        "algorithm.name = 'opd': expected temperature and top_p of 1 in the source's sampling, no top_k, min_p or "
        "penalty, since a reference scores the whole distribution at temperature 1",
    ]
    config.algorithm = OPSD()
    assert conflicts(config, "inference") == [
        "inference.vllm.max_model_len = None: expected more than seq_len = 2048: the policy as its own teacher reads a "
        "demonstration too"
    ]


def test_frozen_models_are_here_or_elsewhere_and_speak_the_policy_s_tokens(tmp_path: Path, tiny_model: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"max_position_embeddings": 64}')
    (other / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (other / "model.safetensors").touch()
    both, here, far = (FrozenModel(path="x", base_url="y"), FrozenModel(path=str(other)), FrozenModel(base_url="a"))
    config = RunConfig(seq_len=64, frozen={"both": both, "here": here, "far": far})
    config.model.path = str(tiny_model)
    assert [problem.key for problem in find_conflicts(config) if problem.key.startswith(("frozen", "seq_len"))] == [
        "frozen.both", "seq_len", "frozen.here.path", "frozen.far.model",
    ]  # fmt: skip
    config = RunConfig(loss=ImportanceLoss(low=2.0, high=2.0))
    assert conflicts(config, "loss") == ["loss.low = 2.0: expected less than loss.high = 2.0"]


def test_functions_that_cannot_be_found_are_named() -> None:
    config = RunConfig(loss=CustomLoss(import_path="no.such.loss"))
    config.env.train = [SourceConfig(id="x", algorithm=CustomAlgorithm(import_path="json.such")),
                        SourceConfig(id="y", algorithm=CustomAlgorithm(import_path="jsn.such"))]  # fmt: skip
    expected = "expected `module.function` of a module that can be imported from here"
    assert conflicts(config, "loss") == [f"loss.import_path = 'no.such.loss': {expected}"]
    assert conflicts(config, "env.train") == [f"env.train.1.algorithm.import_path = 'jsn.such': {expected}"]


def with_sources(**algorithms: dict[str, Any] | None) -> RunConfig:
    sources = [{"id": name, **({"algorithm": a} if a else {})} for name, a in algorithms.items()]
    return parse({"env": {"train": sources}, "algorithm": {"name": "rae"}, "orchestrator": {"group_size": 1}})


def test_a_source_may_have_an_algorithm_of_its_own() -> None:
    config = with_sources(words=None, games={"name": "grpo"})
    assert source_algorithm(config, "words").name == "rae"
    assert source_algorithm(config, "games").name == "grpo"
    assert source_algorithm(config, "unknown").name == "rae"


def test_a_group_of_one_suits_only_algorithms_that_do_not_compare() -> None:
    assert conflicts(with_sources(words=None), "orchestrator.group_size") == []
    assert conflicts(with_sources(words=None, games={"name": "rloo"}), "orchestrator.group_size") == [
        "orchestrator.group_size = 1: expected at least 2: algorithm=rloo compares a group"
    ]


def test_shares_and_pools_that_draw_nothing_are_named() -> None:
    config = RunConfig()
    pools = [Pool(name="a", threshold=0.5, weight=0.0), Pool(name="a", threshold=0.5, weight=0.0)]
    config.env.train = [SourceConfig(id="x", ratio_schedule={0: 1.0, 10: 0.0}, order=DifficultyPools(pools=pools)),
                        SourceConfig(id="y", ratio_schedule={0: 0.0, 20: 1.0})]  # fmt: skip
    assert conflicts(config, "env.train") == [
        "env.train.0.order.pools = ['a', 'a']: expected pools with a name each of their own",
        "env.train.0.order.pools = [0.5, 0.5]: expected pools with a threshold each of their own",
        "env.train.0.order.pools = [0.0, 0.0]: expected a pool with a weight above 0",
    ]
    config.env.train[1].ratio_schedule = {10: 0.0, 20: 1.0}
    assert conflicts(config, "env.train.0.ratio_schedule") == [
        "env.train.0.ratio_schedule = {0: 1.0, 10: 0.0}: expected a source with a share at step 10"
    ]


def test_each_size_of_a_group_must_suit_its_algorithm_and_the_batch() -> None:
    config = with_sources(words=None, games=None, sums={"name": "grpo"}, puns={"name": "grpo"})
    config.orchestrator.batch_size, config.orchestrator.max_inflight = 10, 2
    for source, size in zip(config.env.train, (None, 2, 1, 4), strict=True):
        source.group_size = size
    assert conflicts(config, ("orchestrator", "env.train")) == [
        "env.train.2.group_size = 1: expected at least 2: algorithm=grpo compares a group",
        "orchestrator.batch_size = 10: expected a multiple of env.train.3.group_size = 4",
        "orchestrator.max_inflight = 2: expected at least env.train.3.group_size = 4",
    ]
