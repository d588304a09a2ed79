"""Which degrees of parallelism a model and a number of ranks allow, and how others are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config.run import RunConfig
from prime_hpc.config.trainer import ParallelConfig
from prime_hpc.errors import ConfigurationError
from prime_hpc.models.degrees import Degrees, choose_degrees, find_parallel_problems
from tests.unit.test_placement import make_config as make_slurm_config

DENSE = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 4,
         "intermediate_size": 96, "num_hidden_layers": 2}  # fmt: skip
SPARSE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 12, "moe_intermediate_size": 40, "num_experts_per_tok": 2}
WIDE = {**SPARSE, "num_experts": 48, "moe_intermediate_size": 64}
LINEAR = {**DENSE, "model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]}
UNDIVIDED = "linear attention takes neither cp nor tp"
SHAPE = "16 heads, 4 KV heads, MLPs of width [96]"


def make_config(path: Path, model: dict[str, Any], ranks: int, **parallel: Any) -> RunConfig:
    (path / "config.json").write_text(json.dumps(model))
    config = RunConfig()
    config.model.path, config.trainer.ranks, config.trainer.parallel = str(path), ranks, ParallelConfig(**parallel)
    return config


LEGAL = [
    (DENSE, 8, {}, {"dp_shard": 8}),
    (DENSE, 8, {"dp_replicate": 2, "cp": 2}, {"dp_replicate": 2, "dp_shard": 2, "cp": 2}),
    (DENSE, 16, {"cp": 16}, {"cp": 16}),
    (DENSE, 8, {"tp": 4, "cp": 2}, {"tp": 4, "cp": 2}),
    (DENSE, 4, {"ep": "auto"}, {"dp_shard": 4}),
    (SPARSE, 6, {"ep": "auto"}, {"dp_shard": 6, "ep": 6}),
    (SPARSE, 8, {"ep": "auto"}, {"dp_shard": 8, "ep": 4}),
    (SPARSE, 8, {"ep": "auto", "cp": 2, "tp": 2}, {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4}),
    (SPARSE, 8, {"ep": 4, "dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 4, "ep": 4}),
    (SPARSE, 6, {"ep": "auto", "ep_dispatch": "deepep"}, {"dp_shard": 6}),  # 3 and 6 ranks are not what it takes
    (SPARSE, 8, {"ep": "auto", "ep_dispatch": "deepep"}, {"dp_shard": 8, "ep": 4}),
]


@pytest.mark.parametrize(("model", "ranks", "parallel", "degrees"), LEGAL)
def test_what_is_left_out_follows(model, ranks, parallel, degrees, tmp_path):
    config = make_config(tmp_path, model, ranks, **parallel)
    assert find_parallel_problems(config) == []
    assert choose_degrees(config, ranks) == Degrees(**degrees)


REFUSED = [
    (DENSE, 6, {"dp_replicate": 4}, "dp_replicate = 4: expected one of 1, 2, 3, 6, which 6 ranks with tp=1, cp=1 allow "
                                    f"for {SHAPE}"),
    (DENSE, 8, {"tp": 8}, f"tp = 8: expected one of 1, 2, 4, which 8 ranks allow for {SHAPE}"),
    (DENSE, 24, {"cp": 3}, f"cp = 3: expected one of 1, 2, 4, 8, which 24 ranks with tp=1 allow for {SHAPE}"),
    (DENSE, 4, {"cp": 3, "cp_style": "ring"}, f"cp = 3: expected one of 1, 2, 4, which 4 ranks with tp=1 allow for "
                                              f"{SHAPE}"),
    (DENSE, 4, {"ep": 2}, f"ep = 2: expected 1, which 4 ranks that share a copy allow for {SHAPE}"),
    (SPARSE, 8, {"ep": 8}, "ep = 8: expected one of 1, 2, 4, which 8 ranks that share a copy allow for 16 heads, 4 KV "
                           "heads, MLPs of width [], 12 experts of width 40"),
    (WIDE, 16, {"ep": 16, "ep_dispatch": "deepep"}, "ep = 16: expected one of 1, 2, 4, 8, which 16 ranks that share a "
     "copy with ep_dispatch=deepep, tp=1 and 16 ranks a node allow for 16 heads, 4 KV heads, MLPs of width [], 48 "
     "experts of width 64"),
    (WIDE, 8, {"ep": 2, "tp": 2, "ep_dispatch": "deepep"}, "ep = 2: expected 1, which 4 ranks that share a copy with "
     "ep_dispatch=deepep, tp=2 and 8 ranks a node allow for 16 heads, 4 KV heads, MLPs of width [], 48 experts of "
     "width 64"),
    (LINEAR, 4, {"cp": 2}, f"cp = 2: expected 1, which 4 ranks with tp=1 allow for {SHAPE}; {UNDIVIDED}"),
    (LINEAR, 4, {"tp": 2}, f"tp = 2: expected 1, which 4 ranks allow for {SHAPE}; {UNDIVIDED}"),
    ({**DENSE, "model_type": "gemma"}, 4, {"tp": 2}, "tp = 2: expected 1, which 4 ranks allow for a model of "
                                                     "transformers, which has neither tp nor ep"),
    ({**DENSE, "model_type": "qwen3_vl"}, 4, {"cp": 2}, "cp = 2: expected 1, which 4 ranks with tp=1 allow for a model "
                                                        "that sees, which has neither cp nor tp nor ep"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "ranks", "parallel", "text"), REFUSED)
def test_others_are_refused_with_those_that_are_legal(model, ranks, parallel, text, tmp_path):
    config = make_config(tmp_path, model, ranks, **parallel)
    [problem] = find_parallel_problems(config)
    assert str(problem) == f"trainer.parallel.{text}"
    with pytest.raises(ConfigurationError):
        choose_degrees(config, ranks)


def test_every_mistake_is_reported_at_once(tmp_path):
    config = make_config(tmp_path, SPARSE, 4, tp=3, cp=3, dp_replicate=3, ep=3)
    keys = [problem.key.rpartition(".")[2] for problem in find_parallel_problems(config)]
    assert keys == ["tp", "cp", "dp_replicate", "ep"]


def test_context_parallelism_needs_attention_of_our_own(tmp_path):
    sliding = {**DENSE, "layer_types": ["sliding_attention", "full_attention"]}
    linear = {**DENSE, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
    assert find_parallel_problems(make_config(tmp_path, sliding, 4, cp=2, cp_style="ring")) == []
    for model in (sliding, linear):
        config = make_config(tmp_path, model, 4, cp=2, cp_style="ring")
        config.model.impl = "hf"
        [problem] = find_parallel_problems(config)
        assert problem.key == "trainer.parallel.cp" and "nor cp with windows, states between tokens" in problem.expected


def test_experts_stay_within_a_node(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SPARSE))
    config = make_slurm_config("launcher.name=slurm_hetjob", "cluster.gpus_per_node=2", "trainer.ranks=8",
                               f"model.path={tmp_path}", "trainer.parallel.ep=auto")  # fmt: skip
    assert choose_degrees(config, 8).ep == 2


@pytest.mark.parametrize(("gpus_per_node", "problems"), [(8, 0), (4, 1)])
def test_deepep_crosses_nodes_of_eight_gpus_only(gpus_per_node, problems, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    config = make_slurm_config("launcher.name=slurm_hetjob", f"cluster.gpus_per_node={gpus_per_node}",
                               f"model.path={tmp_path}", "trainer.ranks=16", "trainer.parallel.ep=16",
                               "trainer.parallel.ep_dispatch=deepep")  # fmt: skip
    assert len(find_parallel_problems(config)) == problems


def test_tensor_parallel_engines_divide_the_attention_heads(tmp_path: Path) -> None:
    config = make_config(tmp_path, DENSE, 1)
    config.inference.vllm = {"tensor_parallel_size": 3}
    [problem] = find_parallel_problems(config)
    assert str(problem) == (
        "inference.vllm.tensor_parallel_size = 3: expected one of 1, 2, 4, 8, 16, which divide the 16 attention heads"
    )
    config.inference.vllm = {"tensor_parallel_size": 8}
    assert find_parallel_problems(config) == []


def test_a_model_that_the_trainer_cannot_run_has_no_degrees_to_be_judged(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_head": 12, "n_embd": 768}
    assert find_parallel_problems(make_config(tmp_path, gpt2, 2)) == []
