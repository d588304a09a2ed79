"""The policy: a model of our own or of transformers whose forward ends in scores of tokens, sharded with FSDP2."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Cache,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)

from prime_hpc.config.run import RunConfig
from prime_hpc.config.sections import ModelConfig
from prime_hpc.config.trainer import TrainerConfig
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.models import families, traits, varlen
from prime_hpc.models.attention import SDPA, CachedAttention, choose_backend
from prime_hpc.models.balance import ExpertLoad, even_out, max_violation
from prime_hpc.models.conversion import SAME, Conversion
from prime_hpc.models.family import Family
from prime_hpc.models.lora import LoRA, attach
from prime_hpc.models.mapped import map_directory
from prime_hpc.models.recurrence import INSTALL, TORCH, CachedRecurrence, choose_recurrence, open_recurrence
from prime_hpc.trainer import attention
from prime_hpc.trainer.compilation import compile_block
from prime_hpc.trainer.distributed import World
from prime_hpc.trainer.head import rate_tokens, score_tokens, soften
from prime_hpc.trainer.low_precision import use_fp8
from prime_hpc.trainer.memory.checkpointing import checkpoint_block
from prime_hpc.trainer.memory.offload import ActivationOffload
from prime_hpc.trainer.optim import WHOLE
from prime_hpc.trainer.parallel.context import ContextParallel, Part
from prime_hpc.trainer.parallel.mesh import Mesh
from prime_hpc.trainer.parallel.shard import divide_blocks, shard
from prime_hpc.trainer.row import PackedRow
from prime_hpc.trainer.vision import ImageReader, Pixels, image_places, position_ids

SLOW = f" (slow for linear attention in half precision: {INSTALL})"


class PolicyModel(nn.Module):
    """Decoder and LM head as one module, so that the head's weight is whole when the forward scores tokens."""

    impl: str
    conversion: Conversion = SAME
    """From the names of parameters to those of the checkpoint."""
    lora: LoRA | None = None
    """The adapters that are trained in place of the parameters, if any."""
    sees = False
    """Whether it takes images."""
    forwards = ("next_logits", "rate")
    """Methods beside `forward` that compute with parameters."""
    logit_scale = 1.0
    """Logits are the product of the head times this,"""
    logit_cap: float | None = None
    """under this soft cap."""

    def __init__(self, decoder: nn.Module, head: nn.Linear | None, config: PreTrainedConfig, backend: str, chunk: int):
        super().__init__()
        self.config = config
        self.model = decoder
        self.lm_head = head
        self.backend = backend
        self.context = ContextParallel()
        self._chunk = chunk

    @property
    def kernels(self) -> str:
        """What mixes tokens, in words."""
        return self.backend

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def sharded_apart(self) -> nn.ModuleList:
        """The modules whose parameters are gathered only while they compute."""
        return self.blocks

    @property
    def head_weight(self) -> Tensor:
        """[V, h]; the embedding where the two are tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Log-probability of every scored token given its document so far, and entropy of what it was drawn from.

        Returns:
            Two float32[n] in nats; log(1/V) and log(V), without gradient, where a token is not scored.

        Raises:
            ConfigurationError: the row has images, and the model does not see.
        """
        part, states = self._states(row)
        logprobs, entropy = score_tokens(states, self.head_weight, *self._targets(row, part), self._chunk,
                                         self._product_cap)  # fmt: skip
        uniform = torch.full_like(row.temperatures, float(self.head_weight.shape[0])).log()
        return self.context.unite(-uniform, row, part, logprobs), self.context.unite(uniform, row, part, entropy)

    @torch.no_grad()
    def rate(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Log-probability of every scored token, and 1 where no other is likelier; float32[n], 0 where not scored.

        Raises:
            ConfigurationError: the row has images, and the model does not see.
        """
        part, states = self._states(row)
        logprobs, hits = rate_tokens(states, self.head_weight, *self._targets(row, part), self._chunk,
                                     self._product_cap)  # fmt: skip
        nothing = torch.zeros_like(row.temperatures)
        return self.context.unite(nothing, row, part, logprobs), self.context.unite(nothing, row, part, hits)

    def _states(self, row: PackedRow) -> tuple[Part, Tensor]:
        """This rank's part of a row, and the states [m, h] that predict its scored tokens."""
        if row.images and not self.sees:
            problem = ConfigProblem(
                "model.path", self.config.model_type, "a model that sees: there are images to train"
            )
            raise ConfigurationError([problem])
        part = self.context.divide(row)
        if self.lora:
            self.lora.select(part.row.adapters)
        return part, self.hidden_states(part).index_select(0, part.before)

    def _targets(self, row: PackedRow, part: Part) -> tuple[Tensor, Tensor]:
        """Ids of the scored tokens, and the temperatures of the head's products."""
        return row.token_ids[part.scored], row.temperatures[part.scored] / self.logit_scale

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
        return self.logit_scale * soften((last @ self.head_weight.T).float(), self._product_cap), cache

    @property
    def _product_cap(self) -> float | None:
        """The cap of the head's product, before it is scaled."""
        return self.logit_cap and self.logit_cap / self.logit_scale

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

    def restore_buffers(self, modules: list[nn.Module]) -> None:
        """Compute the buffers of `modules` that no checkpoint holds."""
        raise NotImplementedError


class HFPolicy(PolicyModel):
    """A model of transformers."""

    impl = "hf"
    forwards = (*PolicyModel.forwards, "own_logits")

    def __init__(self, hf: PreTrainedModel, backend: str, chunk: int):
        head = None if hf.config.tie_word_embeddings else hf.get_output_embeddings()
        super().__init__(hf.base_model, head, hf.config, backend, chunk)
        self._text = hf.config.get_text_config()
        self._implementation = self._text._attn_implementation
        self._whole = (hf,)  # no module of its own: its parts are those of the policy
        facts = hf.config.to_dict()
        self.logit_scale, self.logit_cap = traits.logit_scale(facts), traits.logit_cap(facts)
        self.one_by_one = traits.runs_one_by_one(facts) or any(isinstance(m, nn.Conv1d) for m in self.blocks.modules())
        """Whether documents of a row run one after the other."""

    def hidden_states(self, part: Part) -> Tensor:
        row = part.row
        if not self.one_by_one:
            return self._run(row.token_ids, row.position_ids, row.seq_lens)
        missing = self._missing(len(row.seq_lens))
        parts = zip(*(x.split(row.seq_lens) for x in (row.token_ids, row.position_ids)), row.seq_lens, strict=True)
        states = [self._run(tokens, positions, [n]) for tokens, positions, n in parts]
        blank = [self._run(row.token_ids[:1], row.position_ids[:1], [1]) for _ in range(missing)]
        return torch.cat(states) + 0.0 * sum(x.sum() for x in blank)

    def _missing(self, forwards: int) -> int:
        """How many forwards fewer than another rank this one makes: as all gather weights and reduce gradients alike,
        it has to make these too.

        Raises:
            ConfigurationError: ranks or adapters share rows.
        """
        if self.context.group:
            raise ConfigurationError([families.no_context_parallelism(self.context.group.size())])
        if self.lora and len(self.lora.adapters) > 1:
            raise ConfigurationError([families.no_tenants(self.lora.adapters)])
        most = torch.tensor(forwards)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most) - forwards

    def _run(self, token_ids: Tensor, position_ids: Tensor, seq_lens: list[int]) -> Tensor:
        return self.model(input_ids=token_ids[None], position_ids=position_ids[None], use_cache=False,
                          **self._documents(seq_lens, token_ids.device)).last_hidden_state[0]  # fmt: skip

    def _documents(self, seq_lens: list[int], device: torch.device) -> dict[str, Any]:
        """What attention must be told about a row."""
        open_attend = partial(self.context.open_attention, self.backend)
        return attention.row_arguments(self._implementation, open_attend, seq_lens, device)

    def own_logits(self, token_ids: Tensor) -> Tensor:
        """float32[n, V] of one document by the model's own forward, head and eager attention."""
        (hf,) = self._whole
        if self.lm_head is None:
            hf.get_output_embeddings().weight = self.head_weight
        with self._attention("eager"):
            return hf(input_ids=token_ids[None], use_cache=False).logits[0].float()

    @contextmanager
    def _attention(self, implementation: str) -> Iterator[None]:
        self._text._attn_implementation = implementation
        try:
            yield
        finally:
            self._text._attn_implementation = self._implementation

    def restore_buffers(self, modules: list[nn.Module]) -> None:
        """Compute what no checkpoint holds as transformers does, for some all at once from the base model."""
        wanted = {id(module.get_buffer(name)) for module in modules for name in module._non_persistent_buffers_set}
        for tensor in (*self.parameters(), *self.buffers()):
            tensor._is_hf_initialized = id(tensor) not in wanted
        for module in (*modules, self.model):
            self._whole[0]._init_weights(module)

    def extend(
        self, token_ids: Tensor, positions: Tensor, mask: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Cache | None]:
        with self._attention(SDPA if self._implementation == attention.DOCUMENTS else self._implementation):
            out = self.model(input_ids=token_ids, attention_mask=mask, position_ids=positions, use_cache=True,
                             past_key_values=DynamicCache(config=self.config) if cache is None else cache)  # fmt: skip
        return out.last_hidden_state[:, -1], out.past_key_values


class VisionPolicy(HFPolicy):
    """An image-text model of transformers. Its parts are called one by one, since transformers takes every token that
    looks like a placeholder for one, and the policy may sample such a token, which stands for no image."""

    sees = True

    def __init__(self, hf: PreTrainedModel, backend: str, chunk: int, reader: ImageReader, *, frozen: bool):
        super().__init__(hf, backend, chunk)
        self._reader = reader
        self._frozen = frozen
        self.model.visual.requires_grad_(not frozen)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.language_model.layers

    @property
    def sharded_apart(self) -> nn.ModuleList:
        return nn.ModuleList([*self.model.visual.blocks, *self.blocks])

    @property
    def head_weight(self) -> Tensor:
        return self.model.language_model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def hidden_states(self, part: Part) -> Tensor:
        row, pixels = part.row, self._reader.read(part.row)
        embedded, mask = self.model.language_model.embed_tokens(row.token_ids), None
        features, deep = self._look(pixels or self._reader.blank(), embedded)
        if pixels:
            places = image_places(row).to(embedded.device)
            embedded = embedded.index_copy(0, places, features)
            mask = torch.zeros_like(row.token_ids, dtype=torch.bool).index_fill(0, places, True)[None]
        else:
            # every rank runs the tower for every row, so that all gather its weights and reduce its gradients alike
            embedded = embedded + 0.0 * sum(x.sum() for x in (features, *deep))
        positions = position_ids(self.model, row, pixels.grids if pixels else None)
        documents = self._documents(row.seq_lens, row.token_ids.device)
        return self.model.language_model(inputs_embeds=embedded[None], position_ids=positions, use_cache=False,
                                         visual_pos_masks=mask, deepstack_visual_embeds=deep if pixels else None,
                                         **documents).last_hidden_state[0]  # fmt: skip

    def _look(self, pixels: Pixels, like: Tensor) -> tuple[Tensor, list[Tensor]]:
        """[m, h] that stand in the place of the images' tokens, and [m, h] to add behind each of the first layers."""
        values, grids = pixels.values.to(like.device), pixels.grids.to(like.device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._frozen):
            seen = self.model.get_image_features(values, grids)
        return torch.cat(seen.pooler_output).to(like.dtype), [torch.cat(part) for part in seen.deepstack_features]


class NativePolicy(PolicyModel):
    """A model of `prime_hpc.models`, whose linear attention, if it has any, runs on the kernels `linear`."""

    impl = "native"

    def __init__(self, family: Family, config: PreTrainedConfig, backend: str, linear: str, chunk: int):
        lm = family.build(config)
        super().__init__(lm.model, lm.lm_head, config, backend, chunk)
        self.conversion = lm.conversion
        self._linear = linear
        self._load = ExpertLoad(lm)
        self._top_k: int | None = getattr(config, "index_topk", None)

    @property
    def kernels(self) -> str:
        if not self.model.recurs:
            return self.backend
        slow = self._linear == TORCH and self.head_weight.is_cuda
        return f"{self.backend} and {self._linear}{SLOW * slow}"

    def hidden_states(self, part: Part) -> Tensor:
        """Neither padding, nor rows that train nothing, nor passes without a gradient count as load of the experts."""
        row = part.row
        attend = self.context.open_attention(self.backend, row.seq_lens, row.token_ids.device, self._top_k)
        recurrence = open_recurrence(self._linear, row.seq_lens, row.token_ids.device) if self.model.recurs else None
        hidden, chosen = self.model(row.token_ids, row.position_ids, attend, row.replay, recurrence)
        counted = part.real if len(row.scored) and torch.is_grad_enabled() else 0
        self._load.add([layer[:counted] for layer in chosen])
        return hidden

    def extend(
        self,
        token_ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: tuple[CachedAttention, CachedRecurrence] | None,
    ) -> tuple[Tensor, tuple[CachedAttention, CachedRecurrence]]:
        if self._top_k and mask.shape[1] > self._top_k:
            raise NotImplementedError(f"sampling by the trainer beyond {self._top_k} tokens, where an indexer chooses")
        attend, recurrence = cache = cache or (CachedAttention(), CachedRecurrence())
        attend.begin(mask)
        recurrence.begin(mask)
        hidden, _ = self.model(token_ids.flatten(), positions.flatten(), attend, recurrence=recurrence)
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
        linear = choose_recurrence(trainer.linear_attn, device, dtype)
        return NativePolicy(family, hf_config, backend, linear, trainer.head_chunk_tokens)
    eager = trainer.attn == "eager" or (trainer.attn == "auto" and bool(traits.needs_eager(facts)))
    backend = "eager" if eager else choose_backend(trainer.attn, device, dtype)
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
