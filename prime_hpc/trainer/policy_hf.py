"""Policies whose decoder is that of transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from prime_hpc.errors import ConfigurationError
from prime_hpc.models import families, traits
from prime_hpc.models.attention import SDPA
from prime_hpc.trainer import attention
from prime_hpc.trainer.parallel.context import Part
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.trainer.vision import ImageReader, Pixels, image_places, position_ids


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

    @property
    def kernels(self) -> str:
        return self.backend if self._implementation == attention.DOCUMENTS else self._implementation

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
