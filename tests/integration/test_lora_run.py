"""The trainer with adapters: what it publishes, what its checkpoints hold, and that tenants do not touch each other."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from prime_hpc.transport import checkpoints
from prime_hpc.transport.messages import Sample
from tests.trainer_support import TrainerRun, make_run, make_samples

LORA = {"rank": 4, "alpha": 8.0}


def adapters_in(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: load_file(path / "adapter_model.safetensors") for path in folder.iterdir() if path.is_dir()}


def merged(base: dict[str, torch.Tensor], adapter: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """Whole weights from those of the base model and an adapter in the layout of PEFT."""
    whole = dict(base)
    for name, a in adapter.items():
        if name.endswith("lora_A.weight"):
            target = name.removeprefix("base_model.model.").replace("lora_A.", "")
            whole[target] = base[target] + scale * adapter[name.replace("lora_A", "lora_B")] @ a
    return whole


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], atol: float = 0.0) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name} {text}")


def samples_of(step: int, adapters: Sequence[str], wanted: Sequence[str]) -> list[Sample]:
    """Samples that take turns among `adapters`, those of `wanted` alone; in the last of three steps `a` has none."""
    turns = [adapters[i % len(adapters)] for i in range(6)]
    samples = [msgspec.structs.replace(sample, adapter=adapter)
               for sample, adapter in zip(make_samples(step), turns, strict=True)]  # fmt: skip
    return [sample for sample in samples if sample.adapter in wanted and not (step == 3 and sample.adapter == "a")]


def make_tenants(root: Path, model: Path, wanted: Sequence[str], **settings: Any) -> TrainerRun:
    """A run on the samples of the adapters `wanted`: three steps, or two if they have none in the third."""
    lora, steps = {**LORA, "adapters": list(wanted)}, 2 if wanted == "a" else 3
    run = make_run(root, model, lora=lora, max_steps=steps, update={"keep_versions": 9}, **settings)
    return run.record(steps, samples=lambda step: samples_of(step, "ab", wanted))


def test_adapters_are_published_alone_and_the_final_model_has_them_merged(tmp_path, tiny_model):
    run = make_run(tmp_path, tiny_model, lora=LORA, max_steps=2, update={"keep_versions": 9}).record(2).train()
    base = load_file(tiny_model / "model.safetensors")
    fresh, trained = (adapters_in(run.paths.weights_version(f"0.{step}"))["default"] for step in (0, 2))
    projections = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert len(fresh) == 4 * len(projections) * 2
    assert fresh["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (4, 128)
    assert all(tensor.abs().max() == 0 for name, tensor in fresh.items() if "lora_B" in name)
    assert all(not torch.equal(tensor, fresh[name]) for name, tensor in trained.items())
    assert_same(adapters_in(tmp_path / "adapters")["default"], trained)
    config = json.loads((tmp_path / "adapters" / "default" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    assert config["target_modules"] == sorted(projections)
    assert_same(load_file(tmp_path / "model" / "model.safetensors"), merged(base, trained, scale=2.0), atol=1e-6)


def test_merged_weights_are_published_where_engines_want_them(tmp_path, tiny_model):
    lora = {**LORA, "serve": "merged"}
    run = make_run(tmp_path, tiny_model, lora=lora, max_steps=1).record(1).train()
    trained = adapters_in(tmp_path / "adapters")["default"]
    assert_same(run.weights("0.0"), load_file(tiny_model / "model.safetensors"))
    assert_same(run.weights("0.1"), merged(run.weights("0.0"), trained, scale=2.0), atol=1e-6)


def test_a_resumed_run_takes_the_same_steps_from_a_checkpoint_of_adapters_only(tmp_path, tiny_model):
    whole = make_run(tmp_path / "whole", tiny_model, lora=LORA, max_steps=4).record(4).train()
    first = make_run(tmp_path / "run", tiny_model, lora=LORA, max_steps=2).record(2).train()
    size = sum(entry.bytes for entry in checkpoints.verify(first.paths.checkpoint(2)).files.values())
    assert size < 0.6 * (tiny_model / "model.safetensors").stat().st_size
    resumed = make_run(tmp_path / "run", tiny_model, attempt=2, checkpoint_path=first.paths.checkpoint(2), lora=LORA,
                       max_steps=4).record(4).train()  # fmt: skip
    assert resumed.report(4).metrics["loss"] == whole.report(4).metrics["loss"]
    resumed_adapter, adapter = (adapters_in(tmp_path / name / "adapters")["default"] for name in ("run", "whole"))
    assert_same(resumed_adapter, adapter)


def test_adapters_trained_together_on_two_ranks_take_the_steps_of_each_alone(tmp_path, tiny_model):
    """Gradients are clipped to a norm that theirs pass, and the third step has samples for one of them only."""
    settings = {"optimizer": {"max_grad_norm": 0.01, "eps": 1e-3}}
    runs = {wanted: make_tenants(tmp_path / wanted, tiny_model, wanted, ranks=n, **settings)
            for wanted, n in (("a", 1), ("b", 1), ("ab", 2))}  # fmt: skip
    for wanted, run in runs.items():
        _ = run.train_in_forks() if wanted == "ab" else run.train()
    together = adapters_in(tmp_path / "ab" / "adapters")
    for adapter in "ab":
        alone = adapters_in(tmp_path / adapter / "adapters")[adapter]
        assert_same(together[adapter], alone, atol=1e-6)
        steps = (1, 2) if adapter == "a" else (1, 2, 3)
        for step in steps:
            metrics, own = runs["ab"].report(step).metrics, runs[adapter].report(step).metrics
            assert metrics[f"adapter/{adapter}/loss"] == pytest.approx(own["loss"], rel=1e-5)
            assert metrics[f"adapter/{adapter}/grad_norm"] == pytest.approx(own["optim/grad_norm"], rel=1e-5)
            assert own["optim/grad_norm"] > 0.01
    assert "adapter/a/loss" not in runs["ab"].report(3).metrics
    assert not (tmp_path / "ab" / "model").exists()
