"""What an engine of the plan serves: the policy, or a frozen model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_hpc.cluster.role import Role
from prime_hpc.config.model_checks import find_engine_problems
from prime_hpc.errors import ConfigurationError


@dataclass(frozen=True)
class Served:
    """A model, its name in requests, the longest sequence, and the options of its engine."""

    path: str
    tokenizer: str
    name: str
    max_tokens: int
    vllm: dict[str, Any]
    engine_args: dict[str, Any]


def served(role: Role) -> Served:
    """What the engine of this process serves."""
    config, frozen = role.config, role.process.frozen
    policy, inference = config.model, config.inference
    if frozen is None:
        return Served(policy.path, policy.tokenizer or policy.path, policy.served_name, config.seq_len, inference.vllm,
                      inference.engine_args)  # fmt: skip
    model = config.frozen[frozen]
    return Served(
        path=model.path,
        tokenizer=model.path,
        name=frozen,
        max_tokens=config.seq_len + 1,  # a sequence is scored as a prompt, and every request samples a token
        vllm=inference.vllm | model.vllm,
        engine_args=inference.engine_args | model.engine_args,
    )


def require_files(role: Role) -> None:
    """See that the model is there, before vLLM looks for it.

    Raises:
        ConfigurationError: weights or tokenizer are missing.
    """
    model, frozen = served(role), role.process.frozen
    key = "model.path" if frozen is None else f"frozen.{frozen}.path"
    if problems := list(find_engine_problems(key, Path(model.path), Path(model.tokenizer), model.vllm)):
        raise ConfigurationError(problems)
