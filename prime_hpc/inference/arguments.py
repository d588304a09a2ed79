"""From the plan to vLLM's arguments: defaults that fit the machine, and the user's own on top."""

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any, NoReturn

from prime_hpc.cluster.role import Role
from prime_hpc.config.checks import VLLM_LORA_RANKS
from prime_hpc.config.json_files import read_json
from prime_hpc.config.lora import LoRAConfig
from prime_hpc.errors import ConfigProblem, ConfigurationError, nearest_name
from prime_hpc.inference import parsers
from prime_hpc.inference.served import served
from prime_hpc.plan.run_plan import ProcessPlan, RunPlan

CPU_KV_CACHE_BYTES = 128 * 2**20
GPU_SHARE_ALONE = 0.9
GPU_SHARE_WITH_TRAINER = 0.4
TEARDOWN_S = 1
"""vLLM's processes are killed after this; with 0 they never free their shared memory themselves."""
KEY = "inference.vllm"


def set_environment(role: Role) -> None:
    """Defaults for vLLM's environment variables; must run before vLLM is imported."""
    defaults = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
                "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
                "VLLM_ENFORCE_STRICT_TOOL_CALLING": "0"}  # a grammar on tool calls is not the policy  # fmt: skip
    if role.plan.nodes == 1:
        defaults |= {"VLLM_HOST_IP": "127.0.0.1"}
    if role.process.gpus:
        defaults |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    else:
        # one process fewer and no warm-up: an engine on a CPU serves tests and demos, where starting counts most;
        # threads that spin while they wait would take the cores from the trainer and the environments beside it
        defaults |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_CI_ENV": "1", "OMP_WAIT_POLICY": "PASSIVE",
                     "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}  # fmt: skip
    for key, value in defaults.items():
        os.environ.setdefault(key, value)


def arguments(role: Role) -> dict[str, Any]:
    """vLLM's arguments by name: what this product needs, then defaults for the machine, then `inference.vllm`."""
    model = served(role)
    defaults: dict[str, Any] = {
        "model": model.path,
        "tokenizer": model.tokenizer,
        "served_model_name": model.name,
        "max_model_len": model.max_tokens,
        "seed": role.config.seed + role.process.index,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled, at its temperature
        "shutdown_timeout": TEARDOWN_S,
        "worker_extension_cls": "prime_hpc.inference.worker.WeightReceiver",
    }
    if role.process.gpus:
        share = GPU_SHARE_WITH_TRAINER if shares_gpu_with_trainer(role.plan, role.process) else GPU_SHARE_ALONE
        defaults |= {"dtype": "bfloat16", "gpu_memory_utilization": share}
    else:
        defaults |= {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
    if "vision_config" in (read_json(Path(model.path) / "config.json") or {}):
        defaults["limit_mm_per_prompt"] = {"video": 0}  # vLLM would keep room for one
    if role.process.frozen is None:
        if role.config.trainer.router_replay:
            defaults["enable_return_routed_experts"] = True
        defaults |= _lora_arguments(role.config.lora)
    chosen = defaults | parsers.choose(Path(model.path), Path(model.tokenizer)) | model.vllm
    if chosen.get("tool_call_parser"):
        chosen.setdefault("enable_auto_tool_choice", True)
    return chosen


def _lora_arguments(lora: LoRAConfig) -> dict[str, Any]:
    """Room for all adapters at once, so that none is ever evicted and read again from a version that is gone."""
    if not lora.served:
        return {}
    places = len(lora.served)
    rank = next(rank for rank in VLLM_LORA_RANKS if rank >= lora.rank)
    return {"enable_lora": True, "max_loras": places, "max_cpu_loras": places, "max_lora_rank": rank}


def shares_gpu_with_trainer(plan: RunPlan, engine: ProcessPlan) -> bool:
    """Whether a trainer rank of the plan has a GPU of this engine."""
    return any(plan.shares_gpu(trainer, engine) for trainer in plan.of("trainer"))


def parse(given: dict[str, Any]) -> Namespace:
    """vLLM's own view of its arguments.

    Raises:
        ConfigurationError: every name that vLLM does not know, with the nearest that it does; or its own complaint.
    """
    from prime_hpc.inference import adapter

    class Parser(adapter.FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigurationError([ConfigProblem(KEY, given, f"arguments of vLLM ({message})")])

    parser = adapter.make_arg_parser(Parser())
    known = sorted({action.dest for action in parser._actions})
    unknown = [ConfigProblem(f"{KEY}.{name}", given[name], "an argument of `vllm serve`", nearest_name(name, known))
               for name in given if name not in known]  # fmt: skip
    if unknown:
        raise ConfigurationError(unknown)
    args = parser.parse_args(command_line(given))
    adapter.validate_parsed_serve_args(args)
    return args


def command_line(given: dict[str, Any]) -> list[str]:
    """Arguments as `vllm serve` takes them; null leaves an argument at vLLM's default."""
    words: list[str] = []
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        else:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words
