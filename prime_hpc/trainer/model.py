"""The policy of a run, built, prepared and sharded with FSDP2."""

from pathlib import Path

import torch
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)

from prime_hpc.config.run import RunConfig
from prime_hpc.config.sections import ModelConfig
from prime_hpc.config.trainer import TrainerConfig
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.models import families, spec, varlen
from prime_hpc.models.attention import SDPA, choose_backend
from prime_hpc.models.conversion import SAME
from prime_hpc.models.lora import attach
from prime_hpc.models.mapped import map_directory
from prime_hpc.models.recurrence import TORCH, choose_recurrence
from prime_hpc.trainer import attention
from prime_hpc.trainer.compilation import compile_block
from prime_hpc.trainer.distributed import World
from prime_hpc.trainer.low_precision import use_fp8
from prime_hpc.trainer.memory.checkpointing import checkpoint_block
from prime_hpc.trainer.memory.offload import ActivationOffload
from prime_hpc.trainer.parallel.context import ContextParallel
from prime_hpc.trainer.parallel.mesh import Mesh
from prime_hpc.trainer.parallel.shard import divide_blocks, shard
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.trainer.policy_hf import HFPolicy, VisionPolicy
from prime_hpc.trainer.policy_native import NativePolicy
from prime_hpc.trainer.vision import ImageReader


def build_policy(config: RunConfig, world: World) -> PolicyModel:
    """The policy with its final sharding and buffers on `world.device`, and parameters that hold nothing yet.

    In eval mode for good: dropout would part the trainer's log-probabilities from the sampler's.
    """
    trainer = config.trainer
    policy = build_on_meta(config, world.device).eval()
    if trainer.fp8:
        use_fp8(policy.blocks, world.device, experts=trainer.fp8_experts)
    policy.context = ContextParallel(world.mesh.cp, trainer.parallel.cp_style)
    divide_blocks(policy.blocks, world.mesh, trainer.parallel.ep_dispatch)
    _prepare_blocks(policy, trainer, world)
    reshard, dtype = _reshards(trainer, world.mesh.degrees.fsdp), getattr(torch, trainer.dtype)
    shard(policy, policy.sharded_apart, world.mesh, dtype, reshard_after_forward=reshard)
    for method in policy.forwards:
        register_fsdp_forward_method(policy, method)
    policy.to_empty(device=world.device)
    _restore_buffers(policy, world.device)
    return policy


def _prepare_blocks(policy: PolicyModel, trainer: TrainerConfig, world: World) -> None:
    """Recomputation goes inside of the compiled graph, copies to the host around it."""
    offload = ActivationOffload(world.device, trainer.activation_offload) if trainer.activation_offload else None
    for i, block in enumerate(policy.blocks):
        if i % trainer.activation_checkpointing_every == 0:
            checkpoint_block(block, trainer.activation_checkpointing)
        if trainer.compile:
            compile_block(block, fullgraph=_is_one_graph(policy, world.mesh))
        if offload:
            offload.wrap(block)


def _is_one_graph(policy: PolicyModel, mesh: Mesh) -> bool:
    """Whether nothing in a block is beyond the compiler: a block of our own, whole on every rank, and its attention."""
    whole = policy.lora is None and mesh.cp is None and mesh.tp is None and mesh.ep is None
    chooses = getattr(policy.config, "index_topk", None) is not None  # what was chosen is remembered outside
    own = policy.impl == "native" and not chooses and not policy.model.recurs
    return own and whole and policy.backend in varlen.KERNELS


def _reshards(trainer: TrainerConfig, ranks: int) -> bool:
    """Whether a block's gathered weights are freed after its forward pass: not where each of the `ranks` that share a
    copy has all of it anyway."""
    if trainer.reshard_after_forward is not None:
        return trainer.reshard_after_forward
    return ranks > 1 and not trainer.gather_once


def build_on_meta(config: RunConfig, device: torch.device) -> PolicyModel:
    """The policy for `device` and its adapters, whose parameters have no storage. What adapters leave as it is lies in
    the precision of the computation, as no step needs more."""
    policy, lora = _build_model(config, device), config.lora
    if lora.on:
        for parameter in policy.parameters():
            parameter.data = parameter.data.to(getattr(torch, config.trainer.dtype))
        policy.lora = attach(policy, sorted(lora.adapters), lora.rank, lora.alpha, lora.targets)
        if not policy.lora.updates:
            expected = f"a matrix that {config.model.path} has"
            raise ConfigurationError([ConfigProblem("lora.targets", lora.targets, expected)])
    return policy


def _build_model(config: RunConfig, device: torch.device) -> PolicyModel:
    problems = families.find_model_problems(config)
    if problems:
        raise ConfigurationError(problems)
    trainer, hf_config = config.trainer, _load_config(config.model)
    dtype = getattr(torch, trainer.dtype)
    facts = hf_config.to_dict()
    if families.choose_implementation(config, facts) == "native":
        family, backend = families.load_family(hf_config.model_type), choose_backend(trainer.attn, device, dtype)
        linear = choose_recurrence(trainer.linear_attn, device, dtype) if spec.linear_layers(facts) else TORCH
        return NativePolicy(family, hf_config, backend, linear, trainer.head_chunk_tokens)
    backend = "eager" if families.runs_eager(config, facts) else choose_backend(trainer.attn, device, dtype)
    attn = attention.choose_implementation(backend, hf_config.get_text_config())
    if hf_config.model_type in families.SEEING:
        return _build_vision(config, hf_config, backend, attn)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, attn_implementation=attn)
    if hf.base_model_prefix != "model" or not hasattr(hf.base_model, "layers"):
        expected = "a decoder whose blocks are `model.layers`, such as Qwen3 or Llama"
        found = f"{config.model.path} ({hf_config.model_type})"
        raise ConfigurationError([ConfigProblem("model.path", found, expected)])
    policy = HFPolicy(hf, backend, trainer.head_chunk_tokens)
    policy.conversion = SAME if config.model.shape else map_directory(hf, Path(config.model.path))
    return policy


def _build_vision(config: RunConfig, hf_config: PreTrainedConfig, backend: str, attn: str) -> VisionPolicy:
    towers = attn if attn == "eager" else SDPA
    with torch.device("meta"):
        hf = AutoModelForImageTextToText.from_config(
            hf_config, dtype=torch.float32, attn_implementation={"text_config": attn, "vision_config": towers}
        )
    reader = ImageReader(Path(config.model.path), hf_config.vision_config)
    return VisionPolicy(hf, backend, config.trainer.head_chunk_tokens, reader, frozen=config.model.freeze_vision)


def _load_config(model: ModelConfig) -> PreTrainedConfig:
    if model.shape:
        return AutoConfig.for_model(**model.shape)
    return AutoConfig.from_pretrained(model.path)


def _restore_buffers(policy: PolicyModel, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds, such as rotary frequencies: by building their modules anew where
    these can be built from a configuration."""
    volatile = [module for module in policy.modules() if module._non_persistent_buffers_set]
    for module in volatile:
        for buffer in module._non_persistent_buffers_set if hasattr(module, "config") else ():
            fresh = type(module)(config=module.config).to(device)
            module.register_buffer(buffer, getattr(fresh, buffer), persistent=False)
    if others := [module for module in volatile if not hasattr(module, "config")]:
        policy.restore_buffers(others)
