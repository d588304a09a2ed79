"""Sampling parameters that a source cannot have: out of place, unknown to the engine, or another key's business."""

from collections.abc import Iterator
from dataclasses import fields

from prime_hpc.config.env import SamplingConfig, TaskSource
from prime_hpc.config.run import RunConfig
from prime_hpc.config.vllm_arguments import sampling_parameters
from prime_hpc.errors import ConfigProblem, nearest_name

SET_BY_US = ("n", "logprobs", "flat_logprobs", "prompt_logprobs", "prompt_logprob_start", "prompt_logprob_token_ids",
             "logprob_token_ids", "stop_token_ids", "detokenize", "output_kind", "stream_interval",
             "routed_experts_prompt_start", "cache_salt", "chat_template_kwargs")  # fmt: skip
"""Parameters of a request that follow from how rollouts are taken down."""
RESHAPING = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias",
             "allowed_token_ids", "bad_words", "thinking_token_budget")  # fmt: skip
"""Of vLLM's further parameters those that move probabilities."""


def find_sampling_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    """Every mistake in the sampling of a source."""
    for i, source in enumerate(config.env.train):
        yield from _training(config, f"env.train.{i}.sampling", source.sampling)
        yield from _extra(config, f"env.train.{i}.sampling.extra", source)
    for i, evaluated in enumerate(config.env.eval.sources):
        yield from _extra(config, f"env.eval.sources.{i}.sampling.extra", evaluated)


def reshapes(sampling: SamplingConfig) -> bool:
    """Whether tokens are drawn from another distribution than the model's own."""
    plain = sampling.temperature == sampling.top_p == 1 and sampling.top_k is None and not sampling.min_p
    return not plain or any(name in sampling.extra for name in RESHAPING)


def _training(config: RunConfig, key: str, sampling: SamplingConfig) -> Iterator[ConfigProblem]:
    if sampling.temperature == 0:
        yield ConfigProblem(f"{key}.temperature", 0, "more than 0, since a policy gradient needs sampling")
    if sampling.top_k == 1:
        yield ConfigProblem(f"{key}.top_k", 1, "more than 1, since a policy gradient needs sampling")
    if sampling.max_tokens and sampling.max_tokens >= config.seq_len:
        yield ConfigProblem(f"{key}.max_tokens", sampling.max_tokens,
                            f"less than seq_len = {config.seq_len}, which holds the prompt too")  # fmt: skip


def _extra(config: RunConfig, key: str, source: TaskSource) -> Iterator[ConfigProblem]:
    own = [field.name for field in fields(SamplingConfig) if field.name != "extra"]
    known = [name for name in sampling_parameters(config) if name not in (*own, *SET_BY_US)]
    for name, value in source.sampling.extra.items():
        if name in own:
            yield ConfigProblem(f"{key}.{name}", value, f"to be left out: {key.removesuffix('extra')}{name} says it")
        elif name in SET_BY_US:
            yield ConfigProblem(f"{key}.{name}", value, "to be left out: it is set for every request")
        elif known and name not in known:
            nearest = nearest_name(name, [*known, *own])
            yield ConfigProblem(f"{key}.{name}", value, "a parameter of vLLM's SamplingParams", nearest)
