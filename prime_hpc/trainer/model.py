"""The policy: a transformers model whose forward ends in scores of tokens, sharded with FSDP2.

Names of parameters are those of the Hugging Face checkpoint, whatever is wrapped around them.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel

from prime_hpc.algorithms.losses import MicroBatchTensors
from prime_hpc.config.run import RunConfig
from prime_hpc.config.trainer import TrainerConfig
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.trainer import attention
from prime_hpc.trainer.distributed import World
from prime_hpc.trainer.head import score_tokens
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

    @classmethod
    def of(cls, micro: MicroBatch, tensors: MicroBatchTensors) -> "PackedRow":
        """`scored` is found on the host, so that the device need not be waited for."""
        members = micro.mask.numpy()
        for weights in (micro.ce_weights, micro.ref_kl_weights):
            members = members if weights is None else members | (weights.numpy() != 0)
        scored = torch.from_numpy((members & (micro.position_ids() > 0)).nonzero()[0])
        scored = scored.to(tensors.token_ids.device)
        return cls(tensors.token_ids, tensors.position_ids, tensors.temperatures, scored, micro.seq_lens)


class PolicyModel(nn.Module):
    """Decoder and LM head as one module, so that the head's weight is whole when the forward scores tokens."""

    def __init__(self, hf: PreTrainedModel, trainer: TrainerConfig):
        super().__init__()
        self.config = hf.config
        self.model = hf.base_model
        self.lm_head = None if hf.config.tie_word_embeddings else hf.get_output_embeddings()
        self._attn = hf.config._attn_implementation
        self._dtype = getattr(torch, trainer.dtype)
        self._chunk = trainer.head_chunk_tokens

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def head_weight(self) -> Tensor:
        """[V, h]; the embedding where the two are tied."""
        return self.model.get_input_embeddings().weight if self.lm_head is None else self.lm_head.weight

    def forward(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Log-probability of every scored token given its document so far, and entropy of what it was drawn from.

        Returns:
            Two float32[n] in nats; log(1/V) and log(V) where a token is not scored. Only the first has a gradient.
        """
        documents = attention.row_arguments(self._attn, row.seq_lens, row.token_ids.device, self._dtype)
        hidden = self.model(input_ids=row.token_ids[None], position_ids=row.position_ids[None], use_cache=False,
                            **documents).last_hidden_state[0]  # fmt: skip
        weight, scored = self.head_weight, row.scored
        logprobs, entropy = score_tokens(hidden[scored - 1], weight, row.token_ids[scored], row.temperatures[scored],
                                         self._chunk)  # fmt: skip
        uniform = torch.full_like(row.temperatures, float(weight.shape[0])).log()
        return (-uniform).index_copy(0, scored, logprobs), uniform.index_copy(0, scored, entropy)

    def next_logits(self, token_ids: Tensor, mask: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        """One step of sampling.

        Args:
            token_ids: int64[b, t], the tokens that the cache does not hold yet.
            mask: int64[b, cached + t], 0 on padding (to the left).

        Returns:
            float32[b, V] logits of the next token, and the cache.
        """
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -token_ids.shape[1] :]
        self.config._attn_implementation = "sdpa" if self._attn == attention.DOCUMENTS else self._attn
        try:
            out = self.model(input_ids=token_ids, attention_mask=mask, position_ids=positions, use_cache=True,
                             past_key_values=DynamicCache(config=self.config) if cache is None else cache)  # fmt: skip
        finally:
            self.config._attn_implementation = self._attn
        return (out.last_hidden_state[:, -1] @ self.head_weight.T).float(), out.past_key_values


def build_policy(config: RunConfig, world: World) -> PolicyModel:
    """The policy with its final sharding and buffers on `world.device`, and parameters that hold nothing yet.

    In eval mode for good: dropout would part the trainer's log-probabilities from the sampler's.
    """
    trainer = config.trainer
    policy = PolicyModel(_build_on_meta(config), trainer).eval()
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, trainer.dtype), reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in policy.blocks:
        if trainer.compile:
            block.forward = torch.compile(block.forward)
        if trainer.activation_checkpointing:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=world.mesh, mp_policy=precision)
    fully_shard(policy, mesh=world.mesh, mp_policy=precision)
    register_fsdp_forward_method(policy, "next_logits")
    policy.to_empty(device=world.device)
    _restore_buffers(policy, world.device)
    return policy


def _build_on_meta(config: RunConfig) -> PreTrainedModel:
    hf_config = AutoConfig.from_pretrained(config.model.path)
    attn = attention.choose(config.trainer.attn, hf_config)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, attn_implementation=attn)
    if hf.base_model_prefix != "model" or not hasattr(hf.base_model, "layers"):
        expected = "a decoder whose blocks are `model.layers`, such as Qwen3 or Llama"
        found = f"{config.model.path} ({hf_config.model_type})"
        raise ConfigurationError([ConfigProblem("model.path", found, expected)])
    return hf


def _restore_buffers(policy: PolicyModel, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies) by building their modules anew."""
    for name, module in policy.named_modules():
        for buffer in module._non_persistent_buffers_set:
            if not hasattr(module, "config"):
                raise NotImplementedError(f"buffer {buffer} of {name} cannot be rebuilt: its module has no config")
            fresh = type(module)(config=module.config).to(device)
            module.register_buffer(buffer, getattr(fresh, buffer), persistent=False)
