"""Estimates against what was measured: peaks on a GPU (docs/benchmarks.md), what autograd keeps, files of a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import CONFIG_MAPPING, PreTrainedConfig

from prime_hpc.config import compose
from prime_hpc.config.compose import compose_run
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import parse
from prime_hpc.models import activations, spec
from prime_hpc.models.degrees import find_parallel_problems
from prime_hpc.models.families import choose_implementation, load_family
from prime_hpc.plan.build import Attempt, build_plan
from prime_hpc.plan.devices import GIB, known_device
from prime_hpc.plan.disk import disk_use
from prime_hpc.plan.foresight import Foresight, foresee
from prime_hpc.plan.memory import cached_sequences, cached_tokens, engine_memory, trainer_memory
from prime_hpc.plan.peak import kept_activations
from prime_hpc.plan.time import Pace, estimate_pace, train_seconds
from prime_hpc.plan.workload import Workload, guess, measured, micro_batches, sequences
from prime_hpc.trainer.parallel.context import ContextParallel
from tests.trainer_support import make_run

DENSE_600M = {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
              "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
              "tie_word_embeddings": True}  # fmt: skip
SMOLLM2_135M = {"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
                "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
                "tie_word_embeddings": True}  # fmt: skip
H200 = known_device("NVIDIA H200")
ROW = 16384


QUICK = {"compile": True, "head_chunk_tokens": 4096}


def make_config(impl: str = "native", **trainer: Any) -> RunConfig:
    """As the benchmarks ran: bfloat16, rows of 16,384 tokens."""
    return parse({"model": {"impl": impl}, "trainer": {"dtype": "bfloat16", "micro_batch_tokens": ROW, **trainer}})


def shape_of(name: str) -> dict[str, Any]:
    return yaml.safe_load((compose.conf_dir() / "model" / f"{name}.yaml").read_text())["shape"]


PLAIN = {"model_type": "qwen3", "vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 6144,
         "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}  # fmt: skip
SPARSE = {**PLAIN, "model_type": "qwen3_moe", "num_hidden_layers": 6, "num_experts": 64, "num_experts_per_tok": 8,
          "moe_intermediate_size": 768}  # fmt: skip
"""The shapes of tools/check_parallel.py."""


@pytest.mark.parametrize(("model", "config", "tokens", "rows", "measured_gib"), [
    # docs/benchmarks.md, "Trainer alone"
    (shape_of("qwen3_1.7b"), make_config(**QUICK), ROW, 1, 56.87),
    (shape_of("qwen3_1.7b"), make_config(**QUICK, activation_checkpointing="selective"), 4 * ROW, 1, 103.87),
    (shape_of("qwen3_1.7b"),
     make_config(**QUICK, activation_checkpointing="selective", activation_checkpointing_every=2), 4 * ROW, 1, 126.71),
    (shape_of("qwen3_1.7b"),
     make_config(**QUICK, activation_checkpointing="selective", activation_checkpointing_every=3), 4 * ROW, 1, 133.23),
    (shape_of("qwen3_1.7b"), make_config(**QUICK, fp8=True), ROW, 1, 56.9),
    (shape_of("qwen3_0.6b"), make_config(**QUICK), ROW, 1, 30.2),
    (shape_of("qwen3_0.6b"), make_config(**QUICK, activation_offload=4), ROW, 1, 11.16),
    (shape_of("qwen3_moe_3b"), make_config(**QUICK), ROW, 1, 67.71),
    ({**shape_of("qwen3_moe_3b"), "hidden_size": 4096, "moe_intermediate_size": 1408, "num_experts": 32,
      "num_hidden_layers": 4}, make_config(**QUICK), ROW, 1, 60.4),
    (shape_of("qwen3_1.7b"), make_config("hf", **QUICK), ROW, 1, 58.85),  # its head still held 1.2 GiB more
    # "Division of the trainer": one GPU, two rows, nothing compiled
    (PLAIN, make_config(), ROW, 2, 27.74),
    # "Reverse text on two H200s": the largest step of the run and of its warm-up, each one row
    (SMOLLM2_135M, make_config(head_chunk_tokens=4096), 14_936, 1, 10.70),
    (SMOLLM2_135M, make_config(head_chunk_tokens=4096), 7_338, 1, 6.33),
    # first versions of the trainer: the model of transformers, SDPA, an LM head in plain torch
    (DENSE_600M, make_config("hf", attn="sdpa"), ROW, 2, 44.5),
    (DENSE_600M, make_config("hf", attn="sdpa", compile=True), ROW, 2, 33.0),
    (DENSE_600M, make_config("hf", attn="sdpa", activation_checkpointing="full"), ROW, 2, 13.4),
])  # fmt: skip
def test_a_trainer_peak_is_within_a_tenth_of_the_measured_one(model, config, tokens, rows, measured_gib) -> None:
    estimate = trainer_memory(config, model, on_gpu=True, row_tokens=tokens, rows=rows)
    assert estimate.gpu_bytes / GIB == pytest.approx(measured_gib, rel=0.1)


def test_a_trainer_has_room_for_the_buffer_of_deepep() -> None:
    """What its `get_nvl_buffer_size_hint` says of eight ranks, but for some bytes a token."""
    peaks = {}
    for dispatch in ("all_to_all", "deepep"):
        config = make_config(ranks=8, parallel={"ep": 8, "ep_dispatch": dispatch})
        peaks[dispatch] = trainer_memory(config, SPARSE, on_gpu=True).gpu_bytes
    assert peaks["deepep"] - peaks["all_to_all"] == 10 * 8 * 256 * (2 * 2048 + 128 * (8 + 4 + 4))


def narrow(**sizes: int) -> dict[str, Any]:
    return {"model_type": "qwen3", "head_dim": 64, "num_key_value_heads": 2, "tie_word_embeddings": True, **sizes}


HEAVY = narrow(vocab_size=40000, hidden_size=512, intermediate_size=1408, num_hidden_layers=2, num_attention_heads=8,
               num_key_value_heads=4)  # fmt: skip
WORDY = narrow(vocab_size=20000, hidden_size=64, intermediate_size=176, num_hidden_layers=1, num_attention_heads=1,
               num_key_value_heads=1)  # fmt: skip
LIGHT = narrow(vocab_size=1024, hidden_size=256, intermediate_size=704, num_hidden_layers=3, num_attention_heads=4)


@pytest.mark.parametrize(("model", "tokens", "rows", "chunk", "measured_gib"), [
    (HEAVY, 128, 1, 512, 1.10),  # most of it weights and what the optimiser keeps
    (HEAVY, 128, 2, 512, 1.20),
    (LIGHT, 4096, 1, 512, 0.77),  # most of it activations
    (WORDY, 2048, 1, 1024, 1.00),  # most of it logits
])  # fmt: skip
def test_a_trainer_on_a_cpu_needs_as_much_host_memory_as_measured(model, tokens, rows, chunk, measured_gib) -> None:
    """Two steps of `trainer.bench` in float32 by one thread; the most that was resident."""
    config = parse({"mode": "bench", "trainer": {"micro_batch_tokens": tokens, "head_chunk_tokens": chunk}})
    host = trainer_memory(config, model, on_gpu=False, rows=rows).host_bytes
    assert host / GIB == pytest.approx(measured_gib, rel=0.15)


def test_the_kv_cache_holds_as_many_tokens_as_vllm_found_room_for() -> None:
    config = parse({"inference": {"vllm": {"gpu_memory_utilization": 0.5}}})
    cache = engine_memory(config, DENSE_600M, gpus=1, device=H200).gpu["KV cache"]
    assert cached_tokens(config, DENSE_600M, cache, 1) == pytest.approx(633_000, rel=0.01)


@pytest.mark.parametrize(("model", "config", "lengths", "measured_s"), [
    # docs/benchmarks.md, "Trainer alone"
    (shape_of("qwen3_1.7b"), make_config(**QUICK), [4096] * 4, 0.414),
    (shape_of("qwen3_1.7b"), make_config(**{**QUICK, "activation_checkpointing": "selective",
                                            "micro_batch_tokens": 4 * ROW}), [ROW] * 4, 2.055),
    (shape_of("qwen3_moe_3b"), make_config(**QUICK), [4096] * 4, 0.344),
    # "Division of the trainer": one GPU and two, dense and sparse
    (PLAIN, make_config(), [4096] * 8, 0.393),
    (PLAIN, make_config(ranks=2), [4096] * 8, 0.206),
    (SPARSE, make_config(), [4096] * 8, 0.404),
    (SPARSE, make_config(ranks=2), [4096] * 8, 0.207),
    # "Reverse text on two H200s": forward, backward and optimiser, bound by launches
    (SMOLLM2_135M, make_config(), [57] * 256, 0.159),
])  # fmt: skip
def test_a_trainer_is_within_an_eighth_of_the_measured_pace(model, config, lengths, measured_s) -> None:
    workload = Workload(lengths[0] // 2, lengths[0] - lengths[0] // 2, "documents")
    assert train_seconds(config, model, len(lengths), workload, H200) == pytest.approx(measured_s, rel=0.125)


SIZES = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 1,
         "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
KINDS = {
    "afmoe": {"num_shared_experts": 1, "num_dense_layers": 0, **EXPERTS},
    "gemma3_text": {},
    "llama": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "glm4_moe": {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 0, **EXPERTS},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96},
}

CHOOSING = {"num_hidden_layers": 3, "num_key_value_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 64,
            "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32, "index_topk": 128, "index_n_heads": 4,
            "index_head_dim": 32, "indexer_types": ["full", "full", "shared"], "first_k_dense_replace": 3,
            "n_routed_experts": 8, **EXPERTS}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_what_autograd_keeps(kind: str, dtype: torch.dtype) -> None:
    config = CONFIG_MAPPING[kind](**{**SIZES, **KINDS[kind]})
    [estimate] = activations.kept_bytes(config.to_dict(), dtype.itemsize, "composite", joined=True)
    assert kept_by_a_block(config, dtype, tokens=512) / 512 == pytest.approx(estimate, rel=0.04)


def test_activations_over_chosen_keys_are_what_autograd_keeps() -> None:
    config = CONFIG_MAPPING["glm_moe_dsa"](**{**SIZES, **CHOOSING})
    needed = activations.kept_bytes(config.to_dict(), 4, "composite", joined=True, chosen=True)
    assert kept_by_a_block(config, torch.float32, tokens=512) / 512 == pytest.approx(needed[0], rel=0.06)
    anew = activations.input_bytes(config.to_dict(), 4, chosen=True)
    assert [kept - 4 * 256 for kept in anew] == [0, 4 * 128, 0]  # the last layer takes what the second chose


def test_attention_with_scores_needs_room_for_each_pair() -> None:
    small = {**SIZES, "model_type": "qwen3"}
    config = make_config("hf", attn="eager", dtype="bfloat16", micro_batch_tokens=1000)
    packed, _ = kept_activations(config, small, 1000, on_gpu=True)
    assert packed[0] - kept_activations(config, small, 500, on_gpu=True)[0][0] == 8 * 500 * (4 + 2)
    plain = {**small, "model_type": "stablelm"}
    auto = make_config("hf", attn="auto", micro_batch_tokens=1000)
    assert (
        kept_activations(auto, plain, 1000, on_gpu=True)[0][0] > kept_activations(auto, small, 1000, on_gpu=True)[0][0]
    )


def test_engines_keep_keys_of_indexers_and_states_of_delta_rules() -> None:
    glm = LARGE["glm5_swe"]
    assert spec.kv_bytes_per_token(glm, 2) == 78 * (2 * 576 + 132)
    assert spec.kv_bytes_per_token({**glm, "indexer_types": ["full", "shared"] * 39}, 2) == 78 * 2 * 576 + 39 * 132
    rules = {**SIZES, "model_type": "qwen3_5_text", "num_hidden_layers": 4, "linear_num_key_heads": 2,
             "linear_key_head_dim": 8, "linear_num_value_heads": 4, "linear_value_head_dim": 16,
             "linear_conv_kernel_dim": 4}  # fmt: skip
    states = 3 * (4 * 4 * 8 * 16 + 3 * (2 * 16 + 64) * 2)
    assert spec.state_bytes(rules, 2) == states and spec.state_bytes(glm, 2) == 0
    cache = 10.5 * (100 * spec.kv_bytes_per_token(rules, 2) + states)
    assert cached_sequences(parse({}), rules, cache, 1, 100) == 10
    assert cached_tokens(parse({}), rules, cache, 1) > 1000


def kept_by_a_block(config: PreTrainedConfig, dtype: torch.dtype, tokens: int) -> int:
    """Bytes of the tensors that the backward pass of a native block needs, its parameters left out."""
    model = load_family(config.model_type).build(config).to_empty(device="cpu").to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    mine = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(tokens, config.hidden_size, dtype=dtype, requires_grad=True)
    attend = ContextParallel().open_attention(
        "sdpa", [tokens], torch.device("cpu"), getattr(config, "index_topk", None)
    )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model.layers[0](x, model.model.rotaries[model.model.kinds[0]](torch.arange(tokens), dtype), attend)
    return sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in mine)


def test_files_of_a_run_are_as_large_as_estimated(tmp_path: Path, tiny_model: Path) -> None:
    run = make_run(tmp_path, tiny_model, max_steps=2, checkpoint={"every": 1}).record(2).train()
    hf_config = json.loads((tiny_model / "config.json").read_text())
    disk = disk_use(run.plan.typed_config(), hf_config, Workload(8, 8, "made up"))
    assert size_of(run.paths.checkpoint(2)) == pytest.approx(disk.checkpoint, rel=0.05)
    assert size_of(run.paths.weights_version("0.2")) == pytest.approx(disk.version, rel=0.05)
    assert size_of(run.paths.root / "model" / "model.safetensors") == pytest.approx(disk.model, rel=0.05)


def size_of(path: Path) -> int:
    return sum(p.stat().st_size for p in ([path] if path.is_file() else path.rglob("*")))


def peak_of(config: RunConfig, **measured: Any) -> dict[str, float]:
    return trainer_memory(config, DENSE_600M, on_gpu=True, **measured).gpu


def test_shards_divide_state_but_not_activations() -> None:
    one, four = (peak_of(make_config(ranks=n)) for n in (1, 4))
    assert four["optimiser"] * 4 == one["optimiser"]
    assert four["activations"] == one["activations"]
    assert four["gathered weights"] < one["gathered weights"]


def test_gradients_stand_beside_activations_from_the_second_row_of_a_step_on() -> None:
    config = make_config()
    one, two = (peak_of(config, rows=rows) for rows in (1, 2))
    assert (one["gradients"], two["gradients"]) == (0.0, two["weights"])
    # so short a row that the peak is the optimiser's step, when all gradients are there and nothing else is
    short = peak_of(make_config("hf"), rows=1, row_tokens=1)
    assert short["gradients"] == short["weights"]
    packed = parse({"orchestrator": {"batch_size": 512}, "seq_len": 1024, "trainer": {"ranks": 4}})
    assert micro_batches(packed, sequences(packed), Workload(64, 64, "made up")) == 512 * 128 // 1024 // 4


def test_what_waits_on_the_host_is_counted_there() -> None:
    kept = trainer_memory(make_config(), DENSE_600M, on_gpu=True)
    away = trainer_memory(make_config(activation_offload=2, optimizer_offload=True), DENSE_600M, on_gpu=True)
    assert away.host["optimiser"] == kept.gpu["optimiser"]
    assert away.gpu_bytes < kept.gpu_bytes / 2 and away.host["activations"] > kept.gpu_bytes / 2


def test_copies_optimisers_and_adapters_change_what_a_rank_holds() -> None:
    whole = peak_of(make_config(ranks=4))
    copies = peak_of(make_config(ranks=4, parallel={"dp_replicate": 2}))
    assert copies["weights"] == 2 * whole["weights"]
    halves = peak_of(make_config(ranks=4, parallel={"cp": 2}))
    assert halves["weights"] == whole["weights"]
    assert halves["activations"] < 0.6 * whole["activations"]
    narrow = peak_of(make_config(ranks=4, parallel={"tp": 2}))
    assert whole["activations"] / 2 < narrow["activations"] < whole["activations"]
    config = make_config(ranks=4)
    adapted = peak_of(replace(config, lora=replace(config.lora, rank=16)))
    share = 2 * 16 / 1024
    # bfloat16 as far as nothing trains, and the adapters in float32
    assert adapted["weights"] == pytest.approx((0.5 + share) * whole["weights"])
    assert adapted["optimiser"] == 2 * adapted["gradients"] == whole["optimiser"] * share
    muon = parse({"optimizer": {"name": "muon"}, "trainer": {"ranks": 4}})
    assert peak_of(muon)["optimiser"] == whole["gradients"]


def test_tensor_and_expert_parallel_engines_share_their_weights() -> None:
    moe = {**SIZES, **EXPERTS, "model_type": "qwen3_moe"}
    alone = engine_memory(parse({}), moe, gpus=1, device=H200).gpu["weights"]
    experts = 2 * 8 * 3 * 256 * 96
    spread = parse({"inference": {"vllm": {"data_parallel_size": 4, "enable_expert_parallel": True}}})
    assert engine_memory(spread, moe, gpus=4, device=H200).gpu["weights"] == alone - experts * 3 / 4
    halved = parse({"inference": {"vllm": {"tensor_parallel_size": 2, "quantization": "fp8"}}})
    assert engine_memory(halved, moe, gpus=2, device=H200).gpu["weights"] == alone / 4


def test_what_an_engine_keeps_on_its_host_is_counted_there_once() -> None:
    kept = parse({"inference": {"vllm": {"tensor_parallel_size": 2, "kv_offloading_size": 64}}})
    memory = engine_memory(kept, SIZES, gpus=2, device=H200)
    assert memory.processes * memory.host["KV cache"] == 64 * GIB
    assert memory.host_bytes - engine_memory(parse({}), SIZES, gpus=2, device=H200).host_bytes == 32 * GIB


def test_checkpoints_on_disk_are_those_that_are_kept_and_the_one_being_written() -> None:
    workload = Workload(10, 10, "made up")
    kept = parse({"max_steps": 100, "checkpoint": {"every": 10, "keep_last": 3, "keep_every": 50}})
    assert disk_use(kept, DENSE_600M, workload).checkpoints == 3 + 2 + 1
    assert disk_use(parse({"checkpoint": {"every": 0}}), DENSE_600M, workload).checkpoints == 1


def pace(**overrides: Any) -> Pace:
    config = parse({"orchestrator": {"batch_size": 64, "group_size": 8, **overrides}})
    return estimate_pace(config, DENSE_600M, Workload(100, 500, "made up"), trainer=H200, engine=H200, engine_gpus=1,
                         trainer_nodes=1, gpus=2)  # fmt: skip


def test_a_step_takes_as_long_as_its_slower_side_unless_it_is_synchronous() -> None:
    both = pace()
    sides = both.train_s + both.publish_s, both.sample_s + both.load_s
    assert both.step_s == max(sides)
    assert pace(max_staleness=0).step_s == sum(sides)
    assert both.gpu_hours == 2 * both.hours
    assert both.sampled_per_s * both.step_s == pytest.approx(64 * 500)


def test_sampling_takes_longer_where_fewer_rollouts_run_at_once() -> None:
    assert pace(max_inflight=8).sample_s > 4 * pace(max_inflight=64).sample_s


def test_lengths_are_guessed_from_limits_and_measured_where_a_run_has_any() -> None:
    config = parse({"seq_len": 1000, "env": {"train": [{"id": "a", "sampling": {"max_tokens": 200}}]}})
    assert (guess(config).prompt, guess(config).completion) == (225.0, 100.0)
    rows = [{"train/all/prompt_tokens": 10.0, "train/all/completion_tokens": n} for n in (20.0, 40.0)]
    assert measured([{"loss": 1.0}, *rows], "mine") == Workload(10.0, 30.0, "measured in mine")
    assert measured([{"loss": 1.0}], "mine") is None


def look_ahead(tmp_path: Path, **sections: Any) -> Foresight:
    config = parse({"launcher": {"name": "slurm_hetjob"}, "env": {"train": [{"id": "a"}]},
                    "cluster": {"gpus_per_node": 8, "gpu": "H200"}, **sections})  # fmt: skip
    return foresee(build_plan(config, tmp_path / "mine", Attempt(), gpus=0), config, DENSE_600M)


def test_what_does_not_fit_is_said_with_a_remedy(tmp_path: Path) -> None:
    foresight = look_ahead(tmp_path, trainer={"ranks": 8, "micro_batch_tokens": 262_144, "dtype": "bfloat16"})
    [warning] = foresight.warnings
    assert warning.startswith("a trainer rank needs about 3") and "trainer.activation_checkpointing=full" in warning
    assert [role.role for role in foresight.roles] == ["engine GPU", "trainer rank", "orchestrator", "environment"]


@pytest.mark.parametrize(
    ("every", "advice"), [(1, "trainer.parallel.cp"), (2, "trainer.activation_checkpointing_every=1, then trainer.par")]
)
def test_advice_that_is_followed_is_not_given(every: int, advice: str, tmp_path: Path) -> None:
    trainer = {"ranks": 8, "micro_batch_tokens": 8_388_608, "dtype": "bfloat16", "activation_checkpointing": "full"}
    foresight = look_ahead(tmp_path, trainer={**trainer, "activation_checkpointing_every": every})
    [warning] = [words for words in foresight.warnings if words.startswith("a trainer rank needs about")]
    assert warning.partition("most for activations: ")[2].startswith(advice)


def test_gpus_that_nobody_named_leave_the_pace_open(tmp_path: Path) -> None:
    foresight = look_ahead(tmp_path, cluster={"gpus_per_node": 8})
    assert foresight.pace is None
    assert foresight.warnings == ["no estimate of time: cluster.gpu does not say which GPUs the nodes have, e.g. "
                                  "cluster.gpu=H200"]  # fmt: skip
    mistyped = look_ahead(tmp_path, cluster={"gpus_per_node": 8, "gpu": "H20O"})
    assert mistyped.warnings == ["no estimate of time: cluster.gpu=H20O is none of GB200, B200, H200, H100, A100, "
                                 "MI325X, MI300X"]  # fmt: skip
    named = look_ahead(tmp_path, cluster={"gpus_per_node": 8, "gres": "gpu:h100"})
    assert named.pace is not None and named.pace.gpus == 8 + 1


def test_memory_without_a_unit_is_told_as_slurm_reads_it(tmp_path: Path) -> None:
    [words] = look_ahead(tmp_path, cluster={"gpus_per_node": 8, "gpu": "H200", "components": {
        "trainer": {"memory": "500"}}}).warnings  # fmt: skip
    assert "GiB of host memory, not 500 MiB, as a number without a letter means: raise cluster.comp" in words


def test_a_run_too_large_for_the_disk_is_said(tmp_path: Path) -> None:
    foresight = look_ahead(tmp_path, max_steps=10**6, checkpoint={"every": 1, "keep_every": 1})
    assert any(
        words.startswith("the run needs about 66") and "checkpoint.every" in words for words in foresight.warnings
    )


def test_a_node_that_asks_for_too_little_host_memory_is_named(tmp_path: Path) -> None:
    short = look_ahead(tmp_path, cluster={"gpus_per_node": 8, "gpu": "H200", "memory": "8G"}, trainer={"ranks": 8})
    assert [words.partition(" needs")[0] for words in short.warnings] == ["a node of trainer"]
    assert "raise cluster.components.trainer.memory" in short.warnings[0]


def test_weights_that_are_divided_by_heads_alone_stay_gathered() -> None:
    kept, freed = (trainer_memory(make_config(ranks=2, parallel={"tp": 2}, reshard_after_forward=given), PLAIN,
                                  on_gpu=True).gpu["gathered weights"] for given in (None, True))  # fmt: skip
    assert kept > freed


MIXTURE = {"vocab_size": 151_936, "num_experts_per_tok": 8, "head_dim": 128}
LARGE = {
    "qwen3_30b_math": {**MIXTURE, "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
                       "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
                       "num_key_value_heads": 4, "num_experts": 128},
    "glm45_air_swe": {**MIXTURE, "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10_944,
                      "moe_intermediate_size": 1408, "num_hidden_layers": 46, "num_attention_heads": 96,
                      "num_key_value_heads": 8, "n_routed_experts": 128, "n_shared_experts": 1,
                      "first_k_dense_replace": 1},
    "glm5_swe": {**MIXTURE, "model_type": "glm_moe_dsa", "hidden_size": 6144, "intermediate_size": 12_288,
                 "moe_intermediate_size": 2048, "num_hidden_layers": 78, "num_attention_heads": 64,
                 "num_key_value_heads": 64, "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3,
                 "kv_lora_rank": 512, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
                 "v_head_dim": 256, "index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128},
}  # fmt: skip
"""Sizes of the models that the large experiments are for."""


@pytest.mark.parametrize("experiment", LARGE)
def test_large_experiments_fit_the_gpus_that_they_ask_for(experiment: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LARGE[experiment]))
    config = compose_run([f"+experiment={experiment}", f"model.path={tmp_path}", "cluster.gpu=H200"])
    assert choose_implementation(config, LARGE[experiment]) == "native"
    assert find_parallel_problems(config) == []
    foresight = foresee(build_plan(config, tmp_path / "mine", Attempt(), gpus=0), config, LARGE[experiment])
    assert [words for words in foresight.warnings if not words.startswith("the run needs about")] == []


def test_documents_that_run_one_by_one_are_said(tmp_path: Path) -> None:
    config = parse({"env": {"train": [{"id": "a"}]}})
    plan = build_plan(config, tmp_path / "mine", Attempt(), gpus=0)
    kinds = {"lfm2": ["conv"] * 28, "qwen3": ["full_attention"] * 28}
    said = [" ".join(foresee(plan, config, {**DENSE_600M, "model_type": kind, "layer_types": layers}).warnings)
            for kind, layers in kinds.items()]  # fmt: skip
    assert ["the trainer runs the documents of a row one by one" in words for words in said] == [True, False]
