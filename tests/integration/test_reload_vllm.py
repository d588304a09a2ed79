"""A model that is loaded anew into a running engine scores as before, whatever its layers make of weights."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from prime_hpc.models.tiny import make_char_tokenizer
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
SEQUENCE = [1, 9, 4, 17, 22, 2, 5, 6, 7, 8, 30, 12]


def score_before_and_after(rank: int, model: Path) -> list[list[float]]:
    """Scores of a sequence by an engine in this process, before its weights are loaded anew, and after, twice."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from prime_hpc.inference.worker import reload_model

    llm = LLM(model=str(model), dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=2,
              kv_cache_memory_bytes=2**27, enable_prefix_caching=False)  # fmt: skip
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    worker: Any = llm.llm_engine.model_executor.driver_worker
    worker, scores = getattr(worker, "worker", worker), []
    for _ in range(3):
        [reply] = llm.generate([{"prompt_token_ids": SEQUENCE}], params)
        scores.append(
            [found[token].logprob for found, token in zip(reply.prompt_logprobs[1:], SEQUENCE[1:], strict=True)]
        )
        reload_model(worker.get_model(), worker.vllm_config, load_file(model / "model.safetensors").items())
    return scores


def test_a_mixture_scores_as_before(tmp_path: Path) -> None:
    """On a CPU, vLLM packs the weights of experts for its kernel."""
    make_char_tokenizer(tmp_path)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=64, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, head_dim=32,
                            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, num_experts=4,
                            num_experts_per_tok=2, initializer_range=0.2, eos_token_id=3)  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    [[before, *after]] = run_ranks(1, score_before_and_after, tmp_path)
    assert after == [pytest.approx(before, abs=1e-5)] * 2
