"""What vLLM is told: arguments that are refused, and parsers by the format that a model's chat template teaches."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config.checks import find_conflicts
from prime_hpc.config.engine_checks import REFUSED, find_argument_problems
from prime_hpc.config.frozen import FrozenModel
from prime_hpc.config.run import RunConfig
from prime_hpc.config.vllm_arguments import find_unknown_arguments
from prime_hpc.inference import parsers

TIERS = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 2**30, "secondary_tiers": [{"type": "fs_python"}]},
}

BAD = [
    ({"model": "/other"}, {}, "model"),
    ({"tokenizer": "/other"}, {}, "tokenizer"),
    ({"served_model_name": "mine"}, {}, "served_model_name"),
    ({"api_key": "key"}, {}, "api_key"),
    ({"worker_extension_cls": "my.Worker"}, {}, "worker_extension_cls"),
    ({"logprobs_mode": "raw_logprobs"}, {}, "logprobs_mode"),
    ({"stream_interval": 8}, {}, "stream_interval"),
    ({"enable_lora": True}, {}, "enable_lora"),
    ({"enable_eplb": True}, {}, "enable_eplb"),
    ({"speculative_config": {"method": "eagle3", "model": "/draft"}}, {}, "speculative_config"),
    ({"speculative_config": {"model": "/draft"}}, {}, "speculative_config"),
    ({"quantization": "gptq"}, {}, "quantization"),
    ({"kv_offloading_size": 4, "enable_prefix_caching": False}, {}, "enable_prefix_caching"),
    ({"enable_prefix_caching": False}, {"router_replay": True}, "enable_prefix_caching"),
    ({"kv_transfer_config": TIERS}, {}, "kv_transfer_config"),
    ({"kv_transfer_config": TIERS}, {"kv": "drain"}, "kv_transfer_config"),
    ({"kv_transfer_config": TIERS}, {"kv": "keep", "router_replay": True}, "kv_transfer_config"),
    ({"kv_offloading_size": 4}, {"router_replay": True}, "kv_offloading_size"),
    ({"pipeline_parallel_size": 2}, {"router_replay": True}, "pipeline_parallel_size"),
    ({"decode_context_parallel_size": 2}, {"router_replay": True}, "decode_context_parallel_size"),
    ({"disable_log_stats": True}, {"max_inflight": "auto"}, "disable_log_stats"),
]  # fmt: skip

GOOD = [
    ({"logprobs_mode": "processed_logprobs", "stream_interval": 1, "enable_lora": False}, {}),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, {}),
    ({"speculative_config": {"method": "eagle3", "model": "/draft"}, "enable_eplb": True}, {"mode": "serve"}),
    ({"quantization": "fp8", "kv_offloading_size": 4}, {}),
    ({"quantization": "awq"}, {"mode": "sample"}),
    ({"kv_transfer_config": TIERS}, {"kv": "keep"}),
    ({"kv_transfer_config": TIERS}, {"mode": "serve"}),
    ({"pipeline_parallel_size": 2, "disable_log_stats": True, "api_key": None}, {}),
]  # fmt: skip


def make_config(vllm: dict[str, Any], *, mode: str = "rl", kv: str = "recompute", router_replay: bool = False,
                max_inflight: int | str | None = None, path: str = "") -> RunConfig:  # fmt: skip
    config = RunConfig(mode=mode)
    config.inference.vllm, config.update.kv, config.model.path = vllm, kv, path
    config.trainer.router_replay, config.orchestrator.max_inflight = router_replay, max_inflight
    return config


@pytest.mark.parametrize(("vllm", "settings", "name"), BAD)
def test_a_bad_argument_is_named(vllm: dict[str, Any], settings: dict[str, Any], name: str) -> None:
    [problem] = find_argument_problems(make_config(vllm, **settings))
    assert problem.key == f"inference.vllm.{name}"
    assert problem.value == ("***" if name == "api_key" else vllm[name])
    assert problem.expected in [refused.expected for refused in REFUSED if refused.name == name]


@pytest.mark.parametrize(("vllm", "settings"), GOOD)
def test_what_works_is_left_alone(vllm: dict[str, Any], settings: dict[str, Any]) -> None:
    assert list(find_argument_problems(make_config(vllm, **settings))) == []


@pytest.mark.parametrize(("gpus", "said"), [
    (8, ["16, as the parallel sizes of inference.vllm need, or to be left out"]), (16, []), (None, []), (0, []),
])  # fmt: skip
def test_an_engine_has_the_gpus_that_its_parallel_sizes_need(gpus: int | None, said: list[str]) -> None:
    config = RunConfig()
    config.inference.vllm = {"tensor_parallel_size": 2, "data_parallel_size": 8}
    config.inference.gpus_per_replica = gpus
    assert [p.expected for p in find_conflicts(config) if p.key == "inference.gpus_per_replica"] == said


def test_every_refusal_has_a_case() -> None:
    met = {problem.expected for vllm, settings, _ in BAD
           for problem in find_argument_problems(make_config(vllm, **settings))}  # fmt: skip
    assert met == {refused.expected for refused in REFUSED}


def test_a_quantised_model_is_not_trained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    [problem] = find_argument_problems(make_config({}, path=str(tmp_path)))
    assert problem.key == "model.path" and "(gptq)" in problem.expected
    assert list(find_argument_problems(make_config({}, path=str(tmp_path), mode="serve"))) == []


ENGINE_SOURCE = """
@dataclass
class EngineArgs:
    max_num_seqs: int | None = None

    def add_cli_args(parser):
        parser.add_argument("--async-scheduling", dest="x")


class Helper:
    not_an_argument: int = 0
"""
FRONT_SOURCE = "class FrontendArgs:\n    chat_template: str | None = None\n"


@pytest.fixture(params=["entrypoints/openai", "entrypoints/launchers"])
def installed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM whose source can be read, with the command line's arguments where 0.25 or 0.32 has them."""
    package = tmp_path / "vllm"
    for name, text in {"": "raise ImportError", "engine": "", request.param: ""}.items():
        (package / name).mkdir(parents=True, exist_ok=True)
        (package / name / "__init__.py").write_text(text)
    (package / "engine" / "arg_utils.py").write_text(ENGINE_SOURCE)
    (package / request.param / "cli_args.py").write_text(FRONT_SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)


@pytest.mark.usefixtures("installed")
def test_a_mistyped_argument_is_found_in_the_source() -> None:
    config = make_config({"max_num_seq": 64, "max_num_seqs": 64, "chat_template": "x", "async_scheduling": True})
    config.frozen["teacher"] = FrozenModel(path="/teacher", vllm={"not_an_argument": 1, "chat-template": "x"})
    expected = [
        "inference.vllm.max_num_seq = 64: expected an argument of `vllm serve`; did you mean 'max_num_seqs'?",
        "frozen.teacher.vllm.not_an_argument = 1: expected an argument of `vllm serve`",
        "frozen.teacher.vllm.chat-template = 'x': expected an argument of `vllm serve`; did you mean 'chat_template'?",
    ]
    assert [str(problem) for problem in find_unknown_arguments(config)] == expected
    assert [str(problem) for problem in find_conflicts(config) if ".vllm." in problem.key] == expected
    config.launcher.name, config.cluster.python = "slurm_single", "/other/python"
    assert list(find_unknown_arguments(config)) == [], "the nodes have another vLLM"
    config.launcher.name, config.inference.engine = "local", "tests.fake_engine"
    assert list(find_unknown_arguments(config)) == [], "another engine has arguments of its own"


def test_without_vllm_its_arguments_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert list(find_unknown_arguments(make_config({"max_num_seq": 64}))) == []


JSON_CALLS = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
XML_CALLS = "<tool_call>\n<function=example_function_name>\n</function>\n</tool_call>"
MODELS = [
    ("qwen2", JSON_CALLS, "hermes", None),
    ("qwen3", JSON_CALLS + "{% if enable_thinking %}<think>", "hermes", "qwen3"),
    ("qwen3_moe", JSON_CALLS + "assistant\\n<think>\\n", "hermes", "deepseek_r1"),
    ("qwen3_moe", XML_CALLS, "qwen3_coder", None),
    ("qwen3_5_moe", XML_CALLS + "<think>", "qwen3_coder", "qwen3"),
    ("glm4_moe", "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key><think>", "glm45", "glm45"),
    ("glm_moe_dsa", "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><think>", "glm47", "glm45"),
    ("glm4_moe", XML_CALLS + "<think>", "qwen3_coder", "deepseek_r1"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>```json", "deepseek_v3", None),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>```json<think>", "deepseek_v3", "deepseek_r1"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>{% if thinking %}<think>", "deepseek_v31", "deepseek_v3"),
    ("deepseek_v32", "", "deepseek_v32", "deepseek_v3"),
    ("minimax_m2", "<think>", "minimax_m2", "minimax_m2_append_think"),
    ("gpt_oss", "<|channel|>", "openai", None),
    ("nemotron_h", XML_CALLS + "<think>", "qwen3_coder", "nemotron_v3"),
    ("afmoe", JSON_CALLS, "hermes", None),
    ("afmoe", XML_CALLS + "<think>", "qwen3_coder", "deepseek_r1"),
    ("laguna", "<think>", "poolside_v1", "poolside_v1"),
    ("step3p5", XML_CALLS, "step3p5", "step3p5"),
    ("llama", "<|im_start|>", None, None),
]


@pytest.mark.parametrize(("model_type", "template", "tools", "reasoning"), MODELS)
def test_parsers_follow_architecture_and_template(tmp_path: Path, model_type: str, template: str, tools: str | None,
                                                  reasoning: str | None) -> None:  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "chat_template.jinja").write_text(template)
    chosen = parsers.choose(tmp_path, tmp_path)
    assert (chosen.get("tool_call_parser"), chosen.get("reasoning_parser")) == (tools, reasoning)


def test_a_template_may_lie_in_the_tokenizers_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    for template in (JSON_CALLS, [{"name": "default", "template": ""}, {"name": "tool_use", "template": JSON_CALLS}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        assert parsers.choose(tmp_path, tmp_path) == {"tool_call_parser": "hermes"}
