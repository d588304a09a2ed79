"""The policy: a model of our own or of transformers whose forward ends in scores of tokens, sharded with FSDP2."""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

from prime_hpc.algorithms.losses import MicroBatchTensors
from prime_hpc.config.run import RunConfig
from prime_hpc.config.sections import ModelConfig
from prime_hpc.config.trainer import TrainerConfig
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.models import families, varlen
from prime_hpc.models.attention import SDPA, CachedAttention, choose_backend
from prime_hpc.models.balance import ExpertLoad, even_out, max_violation
from prime_hpc.models.conversion import SAME, Conversion
from prime_hpc.models.family import Family
from prime_hpc.models.lora import LoRA, attach
from prime_hpc.trainer import attention
from prime_hpc.trainer.compilation import compile_block
from prime_hpc.trainer.distributed import World
from prime_hpc.trainer.head import score_tokens
from prime_hpc.trainer.low_precision import use_fp8
from prime_hpc.trainer.memory.checkpointing import checkpoint_block
from prime_hpc.trainer.memory.offload import ActivationOffload
from prime_hpc.trainer.optim import WHOLE
from prime_hpc.trainer.parallel.context import ContextParallel, Part
from prime_hpc.trainer.parallel.mesh import Mesh
from prime_hpc.trainer.parallel.shard import divide_blocks, shard
from prime_hpc.transport.messages import MicroBatch


@dataclass(frozen=True)
class PackedRow:
    """A packed row of n tokens, ready for the policy.

    `scored` int64[m] are the places of the tokens whose log-probability a loss asks for, never the first of a document.
    """

    token_ids: Tensor
    position_ids: Tensor
    temperatures: Tensor
    scored: Tensor
    seq_lens: list[int]
    replay: Tensor | None = None
    """int64[layers, n, k]: experts recorded at sampling, negative where there is no record."""
    adapters: dict[str, int] = field(default_factory=dict)
    """Tokens of each adapter, which lie together; empty where there is one policy only."""

    @classmethod
    def of(cls, micro: MicroBatch, tensors: MicroBatchTensors) -> "PackedRow":
        """`scored` is found on the host, so that the device need not be waited for."""
        members = micro.mask.numpy()
        for weights in (micro.ce_weights, micro.ref_kl_weights):
            members = members if weights is None else members | (weights.numpy() != 0)
        scored = torch.from_numpy((members & (micro.position_ids() > 0)).nonzero()[0])
        scored = scored.to(tensors.token_ids.device)
        adapters: dict[str, int] = defaultdict(int)
        for adapter, length in zip(micro.adapters, micro.seq_lens, strict=bool(micro.adapters)):
            adapters[adapter] += length
        replay = micro.routed_experts and torch.tensor(micro.routed_experts.numpy(), device=scored.device)
        return cls(tensors.token_ids, tensors.position_ids, tensors.temperatures, scored, micro.seq_lens,
                   None if replay is None else replay.transpose(0, 1).long(), adapters)  # fmt: skip


class PolicyModel(nn.Module):
    """Decoder and LM head as one module, so that the head's weight is whole when the forward scores tokens."""

    impl: str
    conversion: Conversion = SAME
    """From the names of parameters to those of the checkpoint."""
    lora: LoRA | None = None
    """The adapters that are trained in place of the parameters, if any."""

    def __init__(self, decoder: nn.Module, head: nn.Linear | None, config: PreTrainedConfig, backend: str, chunk: int):
        super().__init__()
        self.config = config
        self.model = decoder
        self.lm_head = head
        self.backend = backend
        self.context = ContextParallel()
        self._chunk = chunk

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def head_weight(self) -> Tensor:
        """[V, h]; the embedding where the two are tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Log-probability of every scored token given its document so far, and entropy of what it was drawn from.

        Returns:
            Two float32[n] in nats; log(1/V) and log(V), without gradient, where a token is not scored.
        """
        part = self.context.divide(row)
        if self.lora:
            self.lora.select(part.row.adapters)
        hidden = self.hidden_states(part)
        weight, scored = self.head_weight, part.scored
        states = hidden.index_select(0, part.before)
        logprobs, entropy = score_tokens(states, weight, row.token_ids[scored], row.temperatures[scored], self._chunk)
        uniform = torch.full_like(row.temperatures, float(weight.shape[0])).log()
        return self.context.unite(-uniform, row, part, logprobs), self.context.unite(uniform, row, part, entropy)

    def next_logits(self, token_ids: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """One step of sampling.

        Args:
            token_ids: int64[b, t], the tokens that the cache does not hold yet.
            mask: int64[b, cached + t], 0 on padding (to the left).
            cache: what the step before returned, None at first.

        Returns:
            float32[b, V] logits of the next token, and the cache.
        """
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -token_ids.shape[1] :]
        last, cache = self.extend(token_ids, positions, mask, cache)
        return (last @ self.head_weight.T).float(), cache

    def tenants(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """The named parameters that are trained together: all of them (`WHOLE`), or those of each adapter."""
        if self.lora is None:
            return {WHOLE: list(self.named_parameters())}
        return {adapter: list(self.lora.parameters(adapter)) for adapter in self.lora.adapters}

    def tenant_of(self, adapter: str) -> str:
        """The tenant that trains on samples of `adapter`, which are the first's where they name none."""
        return WHOLE if self.lora is None else adapter or self.lora.adapters[0]

    def hidden_states(self, part: Part) -> Tensor:
        """[n, h] of the last layer, normed, of this rank's tokens."""
        raise NotImplementedError

    def extend(self, token_ids: Tensor, positions: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """The last hidden state [b, h] of each sequence after its new tokens, and the cache with them."""
        raise NotImplementedError

    def balance_experts(self, rate: float) -> dict[str, float]:
        """Settle the experts' load of a step: its metrics, after a move of the routers' biases by `rate`."""
        return {}


class HFPolicy(PolicyModel):
    """A model of transformers."""

    impl = "hf"

    def __init__(self, hf: PreTrainedModel, backend: str, chunk: int):
        head = None if hf.config.tie_word_embeddings else hf.get_output_embeddings()
        super().__init__(hf.base_model, head, hf.config, backend, chunk)
        self._implementation = hf.config._attn_implementation

    def hidden_states(self, part: Part) -> Tensor:
        row, open_attend = part.row, partial(self.context.open_attention, self.backend)
        documents = attention.row_arguments(self._implementation, open_attend, row.seq_lens, row.token_ids.device)
        return self.model(input_ids=row.token_ids[None], position_ids=row.position_ids[None], use_cache=False,
                          **documents).last_hidden_state[0]  # fmt: skip

    def extend(
        self, token_ids: Tensor, positions: Tensor, mask: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Cache | None]:
        self.config._attn_implementation = SDPA if self._implementation == attention.DOCUMENTS else self._implementation
        try:
            out = self.model(input_ids=token_ids, attention_mask=mask, position_ids=positions, use_cache=True,
                             past_key_values=DynamicCache(config=self.config) if cache is None else cache)  # fmt: skip
        finally:
            self.config._attn_implementation = self._implementation
        return out.last_hidden_state[:, -1], out.past_key_values


class NativePolicy(PolicyModel):
    """A model of `prime_hpc.models`."""

    impl = "native"

    def __init__(self, family: Family, config: PreTrainedConfig, backend: str, chunk: int):
        lm = family.build(config)
        super().__init__(lm.model, lm.lm_head, config, backend, chunk)
        self.conversion = lm.conversion
        self._load = ExpertLoad(lm)

    def hidden_states(self, part: Part) -> Tensor:
        """Neither padding nor rows that train nothing count as load of the experts."""
        row = part.row
        attend = self.context.open_attention(self.backend, row.seq_lens, row.token_ids.device)
        hidden, chosen = self.model(row.token_ids, row.position_ids, attend, row.replay)
        counted = part.real if len(row.scored) else 0
        self._load.add([layer[:counted] for layer in chosen])
        return hidden

    def extend(
        self, token_ids: Tensor, positions: Tensor, mask: Tensor, cache: CachedAttention | None
    ) -> tuple[Tensor, CachedAttention]:
        cache = cache or CachedAttention()
        cache.begin(mask)
        hidden, _ = self.model(token_ids.flatten(), positions.flatten(), cache)
        return hidden.unflatten(0, token_ids.shape)[:, -1], cache

    def balance_experts(self, rate: float) -> dict[str, float]:
        """Sums the load over all ranks, so that the biases stay alike on them. That ranks which see the same tokens all
        count them changes neither a comparison with the mean nor a ratio to it."""
        load = self._load.take()
        if load is None:
            return {}
        dist.all_reduce(load)
        for router, layer in zip(self._load.routers, load, strict=True):
            if router.score_correction is not None and rate:
                even_out(router.score_correction, layer, rate)
        violation = max_violation(load)
        return {"moe/max_vio": violation.mean().item(), "moe/max_vio_worst": violation.max().item()}


def build_policy(config: RunConfig, world: World) -> PolicyModel:
    """The policy with its final sharding and buffers on `world.device`, and parameters that hold nothing yet.

    In eval mode for good: dropout would part the trainer's log-probabilities from the sampler's.
    """
    trainer = config.trainer
    policy = build_on_meta(config, world.device).eval()
    if trainer.fp8:
        use_fp8(policy.blocks, world.device)
    policy.context = ContextParallel(world.mesh.cp, trainer.parallel.cp_style)
    divide_blocks(policy.blocks, world.mesh)
    _prepare_blocks(policy, trainer, world)
    reshard, dtype = _reshards(trainer, world.mesh.degrees.fsdp), getattr(torch, trainer.dtype)
    shard(policy, policy.blocks, world.mesh, dtype, reshard_after_forward=reshard)
    register_fsdp_forward_method(policy, "next_logits")
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
    return policy.impl == "native" and whole and policy.backend in varlen.KERNELS


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
    backend = "eager" if trainer.attn == "eager" else choose_backend(trainer.attn, device, dtype)
    if families.choose_implementation(config, hf_config.to_dict()) == "native":
        family = families.load_family(hf_config.model_type)
        return NativePolicy(family, hf_config, backend, trainer.head_chunk_tokens)
    attn = attention.choose_implementation(backend, hf_config)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, attn_implementation=attn)
    if hf.base_model_prefix != "model" or not hasattr(hf.base_model, "layers"):
        expected = "a decoder whose blocks are `model.layers`, such as Qwen3 or Llama"
        found = f"{config.model.path} ({hf_config.model_type})"
        raise ConfigurationError([ConfigProblem("model.path", found, expected)])
    return HFPolicy(hf, backend, trainer.head_chunk_tokens)


def _load_config(model: ModelConfig) -> PreTrainedConfig:
    if model.shape:
        return AutoConfig.for_model(**model.shape)
    return AutoConfig.from_pretrained(model.path)


def _restore_buffers(policy: PolicyModel, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies) by building their modules anew."""
    for name, module in policy.named_modules():
        for buffer in module._non_persistent_buffers_set:
            if not hasattr(module, "config"):
                raise NotImplementedError(f"buffer {buffer} of {name} cannot be rebuilt: its module has no config")
            fresh = type(module)(config=module.config).to(device)
            module.register_buffer(buffer, getattr(fresh, buffer), persistent=False)
