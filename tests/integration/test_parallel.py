"""Any division of model and batch over ranks computes what one rank computes, in float32 over gloo."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prime_hpc.models.tiny import make_char_tokenizer
from tests.models_support import save_model
from tests.parallel_support import accumulate, check_attention, check_fp8_experts, check_journey, fill_at_random
from tests.ranks import run_ranks
from tests.trainer_support import TrainerRun, make_run

DENSE, BIASED, SPARSE, GLM, INDEXED = "qwen3", "llama, biases", "qwen3_moe, plain", "glm4_moe", "glm_moe_dsa"
AFMOE, MINIMAX, SLIDING, GEMMA, LINEAR = "afmoe", "minimax_m2", "ministral", "gemma3_text", "qwen3_5_moe_text"
MODELS = (DENSE, BIASED, SPARSE, GLM, INDEXED, AFMOE, MINIMAX, SLIDING, GEMMA, LINEAR)
LAYOUTS = [
    (2, {}),
    (4, {}),
    (4, {"dp_replicate": 2}),
    (2, {"ep": 2}),
    (4, {"ep": 2}),
    (4, {"ep": 2, "dp_replicate": 2}),
    (2, {"cp": 2, "ep": 2}),
    (4, {"cp": 2, "ep": 2}),
    (4, {"cp": 2, "ep": 4, "cp_style": "ring"}),
    (2, {"tp": 2}),
    (4, {"tp": 2, "ep": 2}),
    (4, {"tp": 2, "cp": 2, "cp_style": "ring"}),
]
"""Ranks and degrees, for a sparse model with dense layers and shared experts."""
DENSE_LAYOUTS = [
    (2, {"cp": 2}),
    (2, {"cp": 2, "cp_style": "ring"}),
    (4, {"cp": 4}),
    (4, {"cp": 4, "cp_style": "ring"}),
    (4, {"cp": 2}),
    (4, {"cp": 2, "cp_style": "ring", "dp_replicate": 2}),
]
CASES = [
    *((ranks, GLM, "native", degrees) for ranks, degrees in LAYOUTS),
    *((ranks, DENSE, "native", degrees) for ranks, degrees in DENSE_LAYOUTS),
    (2, DENSE, "native", {"tp": 2}),
    (4, DENSE, "native", {"tp": 2}),
    (4, DENSE, "native", {"tp": 2, "cp": 2}),
    (4, BIASED, "native", {"tp": 2, "dp_replicate": 2}),
    (4, SPARSE, "native", {"ep": 4}),
    (2, MINIMAX, "native", {"tp": 2}),
    (4, MINIMAX, "native", {"tp": 2, "ep": 2}),
    (2, MINIMAX, "native", {"cp": 2, "ep": 2, "cp_style": "ring"}),
    (2, GLM, "native", {"ep": 2, "ep_dispatch": "deepep"}),
    (4, INDEXED, "native", {"cp": 2, "ep": 2}),
    (2, INDEXED, "native", {"cp": 2, "cp_style": "ring"}),
    (2, GEMMA, "native", {"tp": 2}),
    (4, AFMOE, "native", {"tp": 2, "ep": 2}),
    (2, AFMOE, "native", {"cp": 2, "ep": 2, "cp_style": "ring"}),
    (2, SLIDING, "native", {"cp": 2}),
    (4, SLIDING, "native", {"cp": 4, "cp_style": "ring"}),
    (4, LINEAR, "native", {"ep": 2, "dp_replicate": 2}),
    (2, DENSE, "hf", {}),
    (2, DENSE, "hf", {"cp": 2}),
    (4, DENSE, "hf", {"cp": 2, "cp_style": "ring"}),
]


@pytest.fixture(scope="module")
def compute(tmp_path_factory):
    """Runs a case and keeps what one rank computes of a model."""
    models = {name: tmp_path_factory.mktemp("model") for name in MODELS}
    for name, path in models.items():
        save_model(name, path)

    def run(ranks: int, model: str, impl: str, sequence_loss: bool, degrees: dict[str, Any]) -> list[dict[str, Any]]:
        store = tmp_path_factory.mktemp("store") / "store"
        return run_ranks(ranks, accumulate, ranks, store, models[model], impl, sequence_loss, degrees)

    @cache
    def run_alone(model: str, impl: str, sequence_loss: bool) -> dict[str, Any]:
        return run(1, model, impl, sequence_loss, {})[0]

    run.alone = run_alone
    return run


def describe(case: tuple[int, str, str, dict[str, Any]]) -> str:
    ranks, model, impl, degrees = case
    return "-".join([str(ranks), model.split(",")[0], impl, *(f"{key}={value}" for key, value in degrees.items())])


@pytest.mark.parametrize("case", CASES, ids=describe)
def test_losses_gradients_and_norms_equal_those_of_one_rank(case, compute):
    check(compute, *case, sequence_loss=False)


def test_a_loss_over_sequences_sees_them_whole_where_ranks_divide_them(compute):
    check(compute, 4, DENSE, "native", {"cp": 4, "cp_style": "ring"}, sequence_loss=True)


def check(compute: Any, ranks: int, model: str, impl: str, degrees: dict[str, Any], *, sequence_loss: bool) -> None:
    expected = compute.alone(model, impl, sequence_loss)
    results = compute(ranks, model, impl, sequence_loss, degrees)
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=1e-6)
        assert result["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert result["clipped"] == pytest.approx(0.5, rel=1e-5)
        assert result["experts"] == pytest.approx(expected["experts"], rel=1e-6)
        assert result["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in result["gradients"].items():
            scale = np.abs(expected["gradients"][name]).max()
            np.testing.assert_allclose(gradient, expected["gradients"][name], rtol=0, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("style", ["ulysses", "ring"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_divided_attention_is_that_of_the_whole_row(ranks, style, tmp_path):
    for difference in run_ranks(ranks, check_attention, ranks, tmp_path / "store", style):
        assert difference < 1e-14


def test_rows_reach_the_ranks_of_their_experts_and_return(tmp_path):
    first, second = run_ranks(2, check_journey, 2, tmp_path / "store")
    assert first == [[3, 0, 1, 2], [3, 0]]
    assert second == [[0, 0, 4, 2], [5, 4]]


def test_divided_experts_in_fp8_follow_whole_ones_in_float32_however_tokens_reach_them(tmp_path):
    for errors in run_ranks(2, check_fp8_experts, 2, tmp_path / "store"):
        assert errors.keys() == {"all_to_all", "deepep"}
        assert all(0.01 < error < 0.12 for found in errors.values() for error in found)


@pytest.mark.parametrize(("ranks", "degrees", "frees"), [
    (2, {"dp_replicate": 2}, False), (2, {"tp": 2}, False), (4, {"tp": 2, "ep": 2}, True),
])  # fmt: skip
def test_copies_of_random_weights_are_alike_and_stay_gathered_where_they_are_whole(ranks, degrees, frees, tmp_path):
    save_model(GLM, tmp_path)
    results = run_ranks(ranks, fill_at_random, ranks, tmp_path / "store", tmp_path, degrees)
    assert [result["frees"] for result in results] == [frees] * ranks
    for name in results[0]["shards"]:
        by_place: dict[str, np.ndarray] = {}
        for place, shard in (result["shards"][name] for result in results):
            np.testing.assert_array_equal(by_place.setdefault(place, shard), shard, err_msg=name)
        matrices = [shard for shard in by_place.values() if shard.ndim > 1]
        assert len({shard.tobytes() for shard in matrices}) == len(matrices), name


RUNS = [
    (2, {"cp": 2, "ep": 2}, 2, {}),
    (2, {}, 2, {"tp": 2}),
    (4, {"tp": 2, "ep": 2}, 4, {"dp_replicate": 2, "ep": 2}),
]
"""Ranks and degrees of two steps, and of a third."""


def train(root: Path, model: Path, ranks: int, degrees: dict[str, Any], **others: Any) -> TrainerRun:
    settings = {"trainer": {"parallel": degrees, "router_bias_rate": 0.125}, "optimizer": {"lr": 0.01, "eps": 1e-4}}
    run = make_run(root, model, ranks=ranks, **settings, **others)
    return run.record(3).train_in_forks()


def test_a_run_goes_on_under_another_layout(tmp_path):
    model = tmp_path / "model"
    save_model(GLM, model)
    make_char_tokenizer(model)
    whole = train(tmp_path / "whole", model, 1, {}, max_steps=3)
    for i, (ranks, degrees, other_ranks, others) in enumerate(RUNS):
        root = tmp_path / str(i)
        first = train(root, model, ranks, degrees, max_steps=2)
        reports = {1: first.report(1), 2: first.report(2)}
        resumed = train(root, model, other_ranks, others, max_steps=3, attempt=2,
                        checkpoint_path=first.paths.checkpoint(2))  # fmt: skip
        for step, report in {**reports, 3: resumed.report(3)}.items():
            for metric in ("loss", "optim/grad_norm", "moe/max_vio", "tokens/trained", "entropy"):
                expected = whole.report(step).metrics[metric]
                assert report.metrics[metric] == pytest.approx(expected, rel=1e-4, abs=1e-6), (i, step, metric)
        for name, tensor in resumed.weights("0.3").items():
            torch.testing.assert_close(tensor, whole.weights("0.3")[name], rtol=0, atol=1e-4)
