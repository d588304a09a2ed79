"""The bench of the trainer: its batches, its FLOPs, its figures."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from prime_hpc.config.compose import compose_run
from prime_hpc.config.run import RunConfig
from prime_hpc.models.degrees import Degrees
from prime_hpc.models.spec import train_flops
from prime_hpc.trainer import bench
from prime_hpc.trainer.distributed import World
from prime_hpc.trainer.model import build_policy
from prime_hpc.trainer.parallel.mesh import Mesh
from tests.models_support import FAMILY_NAMES, load_native, save_model
from tools.bench_trainer import planned_gib

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}  # fmt: skip


@pytest.fixture
def world() -> Iterator[World]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, torch.device("cpu"), Mesh.of("cpu", Degrees()), dist.group.WORLD)
    dist.destroy_process_group()


def small_config(*overrides: str) -> RunConfig:
    shape = [f"model.shape.{key}={value}" for key, value in SMALL.items()]
    return compose_run(["+experiment=bench_trainer", *shape, "seq_len=16", "trainer.micro_batch_tokens=40",
                        "trainer.compile=false", "trainer.dtype=float32", *overrides])  # fmt: skip


def test_figures_are_of_whole_steps_after_the_warm_up(world, monkeypatch):
    seconds = iter([9.0, 5.0, 2.0, 4.0, 2.0])
    step = bench._step
    monkeypatch.setattr(bench, "_step", lambda *args: {**step(*args), "time/step": next(seconds)})
    lines: list[str] = []
    config = small_config("max_steps=5", "trainer.bench.warmup=2", "trainer.bench.rows=3")
    result = bench.measure(config, world, lines.append)
    assert len(lines) == 5
    assert (result["tokens"], result["seconds"]["step"], result["tokens_per_s"]) == (120, 2.0, 60.0)
    assert result["tflops_per_rank"] == pytest.approx(train_flops(config.model.shape, [16] * 7 + [8]) / 2.0 / 1e12)
    assert set(result["seconds"]) == {"forward", "backward", "forward_backward", "optimizer", "step"}
    assert (result["implementation"], result["attention"], result["mfu"]) == ("native", "sdpa", None)
    planned = planned_gib(config, on_gpu=False)
    for category in ("weights", "optimizer"):
        assert planned[category] == pytest.approx(result["memory_gib"][category], rel=0.01)
    assert planned["peak"] == planned["weights"] + planned["optimizer"] + planned["transient"]


@pytest.mark.parametrize("impl", ["native", "hf"])
def test_random_weights_train(impl, world):
    """The first loss is that of a model that knows nothing: scores near those of a uniform distribution."""
    result = bench.measure(small_config("max_steps=2", "trainer.bench.warmup=1", f"model.impl={impl}"), world, print)
    assert result["implementation"] == impl
    assert result["tokens"] == 40


@pytest.mark.parametrize("impl", ["native", "hf"])
@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3", "qwen3_5_text"])
def test_norms_multiply_by_one(kind, impl, world):
    policy = build_policy(small_config(f"model.shape.model_type={kind}", f"model.impl={impl}"), world)
    bench.initialise(policy, seed=0)
    norms = {name: module for name, module in policy.named_modules() if name.endswith("norm")}
    assert len(norms) > 4
    centred = kind != "qwen3"
    for name, norm in norms.items():
        weight, plain = norm.weight.full_tensor(), not centred or ".linear_attn." in name
        assert weight.eq(1.0 if plain else 0.0).all(), name


def test_lengths_are_fixed_or_spread():
    rng = np.random.default_rng(0)
    assert bench.draw_lengths(small_config(), 40, rng) == [16, 16, 8]
    config = small_config("seq_len=1000", "trainer.micro_batch_tokens=1000", "trainer.bench.spread=1")
    lengths = bench.draw_lengths(config, 100_000, rng)
    assert sum(lengths) == 100_000
    assert max(lengths) == 1000 and min(lengths[:-1]) >= bench.SHORTEST
    assert 400 < np.median(lengths) < 600


def add_heads(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
    """In place of attention: depends on all of its inputs and multiplies no matrices."""
    return query + (key + value).repeat_interleave(query.shape[1] // key.shape[1], dim=1)


class AddRates:
    """In place of a delta rule and its convolution, likewise."""

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight.sum(-1)

    def delta_rule(self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        return value * ((query + key).mean((1, 2))[:, None] + log_decay + beta)[..., None]


def rule_flops(config: dict[str, int]) -> int:
    """Of one delta rule with its convolution, for a token."""
    heads, keys = config["linear_num_value_heads"], config["linear_num_key_heads"] * config["linear_key_head_dim"]
    channels = 2 * keys + heads * config["linear_value_head_dim"]
    state = heads * config["linear_key_head_dim"] * config["linear_value_head_dim"]
    return 2 * (3 * state + channels * config["linear_conv_kernel_dim"])


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_flops_are_those_of_the_products_that_run(name, tmp_path):
    """Everything but attention and delta rules, which are left out here, as torch counts what is executed. There is one
    pair in a document of one token."""
    save_model(name, tmp_path)
    model, n = load_native(tmp_path), 12
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(n), torch.arange(n), add_heads, recurrence=AddRates()).sum().backward()
    config = json.loads((tmp_path / "config.json").read_text())
    latent = [config.get(f"{part}_head_dim", 0) for part in ("qk_nope", "qk_rope", "v")]
    dims = sum(latent) or 2 * config["head_dim"]
    linear = (config.get("layer_types") or []).count("linear_attention")
    pairs = 2 * config["num_attention_heads"] * dims * (config["num_hidden_layers"] - linear) * n
    rules = linear * n * rule_flops(config) if linear else 0
    assert counter.get_total_flops() == train_flops(config, [1] * n) - 3 * (pairs + rules)
