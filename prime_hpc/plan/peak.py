"""The peak of a trainer rank: what lives at each moment of a step as FSDP2, autograd and the LM head hold it.

Bytes that are allocated; what an allocator keeps beside them, for lack of a hole that fits, is not in them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from prime_hpc.config.run import RunConfig
from prime_hpc.config.sizes import trainer_ranks
from prime_hpc.models import activations, spec
from prime_hpc.models.activations import NormKernel
from prime_hpc.models.degrees import Degrees, choose_degrees
from prime_hpc.models.families import choose_implementation, runs_eager, runs_one_by_one
from prime_hpc.models.spec import HFConfig
from prime_hpc.plan.workload import longest_row

BYTES = {"float32": 4, "bfloat16": 2}
MASTER = 4
"""Bytes of a parameter that trains, of a gradient that is reduced or of a moment of AdamW: all in float32."""
MOMENTS = {"adamw": 2, "muon": 1, "signsgd": 0}
"""Tensors of a parameter's size that an optimiser keeps; muon has two for what is no matrix."""

Parts = dict[str, float]
"""Bytes by what they are for."""


def training_peak(config: RunConfig, hf_config: HFConfig, *, on_gpu: bool, row_tokens: int | None = None,
                  rows: int = 2) -> Parts:  # fmt: skip
    """What a rank holds at the moment of a step at which it holds most.

    Args:
        row_tokens: tokens of the longest row; as many as a row may have when left out.
        rows: micro-batches of a step. From the second one on, gradients exist beside the activations.
    """
    step = _Step(config, hf_config, on_gpu, row_tokens or longest_row(config), accumulates=rows > 1)
    return max(step.moments(), key=lambda parts: sum(parts.values()))


def trained_params(config: RunConfig, hf_config: HFConfig) -> float:
    """Parameters with a gradient: all; with adapters r(a + b) for each a x b matrix, every side taken to be as long as
    the hidden size, since few are shorter."""
    parameters, hidden = spec.param_count(hf_config), spec.layer_widths(hf_config)[0].hidden
    if not config.lora.on:
        return parameters
    return min(1.0, 2 * config.lora.rank / hidden * len(config.lora.adapters)) * parameters


def sharing_ranks(config: RunConfig) -> int:
    """Trainer ranks that hold one copy of the parameters among them."""
    degrees = choose_degrees(config, trainer_ranks(config))
    return degrees.fsdp * degrees.tp


def kept_activations(config: RunConfig, hf_config: HFConfig, row_tokens: int, *,
                     on_gpu: bool) -> tuple[list[int], list[int]]:  # fmt: skip
    """Bytes of each block for one token of a row that its backward pass needs, and of these what is kept from the
    forward."""
    trainer, width = config.trainer, BYTES[config.trainer.dtype]
    chosen = _chooses(config, hf_config, row_tokens)
    split, compiled = trainer.parallel.tp, trainer.compile
    packed = on_gpu and trainer.attn == "auto" and trainer.dtype == "bfloat16" and trainer.parallel.cp == 1
    joined = not packed and trainer.attn in ("auto", "sdpa")
    needed = activations.kept_bytes(hf_config, width, norm_kernel(config, hf_config, on_gpu=on_gpu), joined=joined,
                                    split=split, compiled=compiled, chosen=chosen)  # fmt: skip
    scores = _score_bytes(config, hf_config, row_tokens)
    needed = [whole + scores for whole in needed]
    kept = {
        "none": lambda: needed,
        "selective": lambda: [
            products + scores
            for products in activations.product_bytes(hf_config, width, split=split, compiled=compiled, chosen=chosen)
        ],
        "full": lambda: activations.input_bytes(hf_config, width, chosen=chosen),
    }
    anew = kept[trainer.activation_checkpointing]()
    return needed, [anew[i] if i % trainer.activation_checkpointing_every == 0 else whole
                    for i, whole in enumerate(needed)]  # fmt: skip


def _chooses(config: RunConfig, hf_config: HFConfig, row_tokens: int) -> bool:
    """Whether a row may have a document that is longer than what indexers choose of it."""
    top_k = spec.text_of(hf_config).get("index_topk") or 0
    native = choose_implementation(config, hf_config) == "native"
    return native and 0 < top_k < min(row_tokens, config.seq_len)


def _score_bytes(config: RunConfig, hf_config: HFConfig, row_tokens: int) -> int:
    """Of a layer for one token, where attention has a score of each pair: in the row, or in a document alone."""
    if choose_implementation(config, hf_config) != "hf" or not runs_eager(config, hf_config):
        return 0
    seen = min(row_tokens, config.seq_len) if runs_one_by_one(config, hf_config) else row_tokens
    heads, trainer = spec.divisions(hf_config).heads, config.trainer
    return activations.score_bytes(heads, seen, BYTES[trainer.dtype], split=trainer.parallel.tp)


def norm_kernel(config: RunConfig, hf_config: HFConfig, *, on_gpu: bool) -> NormKernel:
    """Who computes norms, which decides what they keep."""
    if config.trainer.compile:
        return "fused"
    if choose_implementation(config, hf_config) == "hf":
        return "hf"
    return "fused" if on_gpu else "composite"


@dataclass(frozen=True)
class _Step:
    """A rank's share of a step: its `tokens` of a row; `accumulates`: gradients of an earlier row are there already."""

    config: RunConfig
    hf_config: HFConfig
    on_gpu: bool
    row_tokens: int
    accumulates: bool

    def moments(self) -> Iterator[Parts]:
        """The begin of the backward pass in the LM head, each block's part of it, its end, and the optimiser's step."""
        needed, kept = kept_activations(self.config, self.hf_config, self.row_tokens, on_gpu=self.on_gpu)
        yield self._moment(activations=self._before(len(kept), kept) + self.tokens * self._last, logits=self._head(),
                           gathered=self._gathered(len(kept)))  # fmt: skip
        widest = activations.backward_bytes(self.hf_config, self._width, split=self.config.trainer.parallel.tp,
                                            compiled=self.config.trainer.compile)  # fmt: skip
        for i, block in enumerate(self._blocks):
            own = self.tokens * (needed[i] + widest[i]) + self._unreduced(block)
            yield self._moment(activations=self._before(i, kept) + own + self._root_gradient,
                               gathered=self._gathered(i + 1), reduced=self._later[i])  # fmt: skip
        both = self._unreduced(self._root) + (self._root_gradient if self._tied else 0.0)  # before the two are added
        yield self._moment(activations=both, gathered=self._gathered(0), reduced=self._all)
        yield self._moment(gathered=0.0, reduced=self._all, offloaded=False)

    def _moment(self, *, gathered: float, activations: float = 0.0, logits: float = 0.0, reduced: float = 0.0,
                offloaded: bool = True) -> Parts:  # fmt: skip
        """What stays, what is given, and the gradients of `reduced` parameters, or of all where rows add up."""
        trainer = self.config.trainer
        moments = MOMENTS[self.config.optimizer.name] * (not (offloaded and self.on_gpu and trainer.optimizer_offload))
        whole = self.accumulates and trainer.gather_once
        gradients = self._all if self.accumulates else reduced
        frozen = self._width if self.config.lora.on else 0
        return {
            "weights": (MASTER * self._trained + frozen) * self._all / self._shards,
            "gradients": MASTER * self._trained * gradients / (1 if whole else self._shards),
            "optimiser": MASTER * moments * self._trained * self._all / self._shards,
            "gathered weights": self._width * gathered,
            "activations": activations,
            "logits": logits,
        }

    def _before(self, blocks: int, kept: list[int]) -> float:
        """Activations of the first `blocks` blocks; those that wait on the host leave what is on its way."""
        under_way = self.config.trainer.activation_offload if self.on_gpu else 0
        if not under_way:
            return self.tokens * sum(kept[:blocks])
        widest = max(max(w.feed_forward, w.hidden) for w in spec.layer_widths(self.hf_config))
        return self.tokens * 2 * under_way * widest * self._width

    def _gathered(self, blocks: int) -> float:
        """Whole parameters on this rank while the first `blocks` blocks still have to go back: the root's, and all of
        theirs, or those of one and of the next where they are freed in between."""
        trainer = self.config.trainer
        freed = trainer.reshard_after_forward
        if freed is None:
            freed = self._degrees.fsdp > 1 and not trainer.gather_once
        return self._root + sum(self._blocks[max(0, blocks - 2) if freed else 0 : blocks])

    def _head(self) -> float:
        """The last chunk of the LM head's backward pass: gradients of its weight in float32 and of the states, two
        chunks of logits (the old one lives until the new one is there), or a chunk and its part of the weight's
        gradient. Without kernels of its own a logit takes 25 bytes of float32 steps more."""
        chunk = min(self.tokens, self.config.trainer.head_chunk_tokens)
        logits = chunk * spec.vocabulary(self.hf_config) * self._width
        steps = 0 if self.on_gpu else 25 * logits / self._width
        chunks = 2 if self.tokens > chunk else 1
        states = self.tokens * self._hidden * self._width
        if self.config.lora.on:
            return chunks * logits + steps + states
        weight = spec.vocabulary(self.hf_config) * self._hidden
        return MASTER * weight + max(chunks * logits + steps, logits + self._width * weight) + states

    def _unreduced(self, parameters: float) -> float:
        """Gradients of `parameters` as the backward pass makes them, and the float32 copy that is reduced."""
        return (self._width + MASTER) * parameters * self._trained

    @property
    def tokens(self) -> int:
        return ceil(self.row_tokens / self.config.trainer.parallel.cp)

    @property
    def _root_gradient(self) -> float:
        """Of the LM head, which waits for the end of the backward pass."""
        return self._width * spec.vocabulary(self.hf_config) * self._hidden * self._trained

    @property
    def _last(self) -> float:
        """Bytes for a token of the last norm's input and of the states that are scored."""
        norm = norm_kernel(self.config, self.hf_config, on_gpu=self.on_gpu)
        return self._hidden * (activations.norm_bytes(norm, self._width) + self._width)

    @cached_property
    def _trained(self) -> float:
        """Share of the parameters that have a gradient."""
        return trained_params(self.config, self.hf_config) / spec.param_count(self.hf_config)

    @cached_property
    def _blocks(self) -> list[float]:
        """Parameters of each block as this rank gathers it: its part of the heads, channels and experts."""
        tp, ep = self._degrees.tp, self._degrees.ep
        return [dense / tp + experts / ep for dense, experts in spec.layer_params(self.hf_config)]

    @cached_property
    def _later(self) -> list[float]:
        """Parameters of all blocks behind each."""
        sizes = [sum(parts) for parts in spec.layer_params(self.hf_config)]
        return [sum(sizes[i + 1 :]) for i in range(len(sizes))]

    @cached_property
    def _tied(self) -> bool:
        """Whether the LM head is the embedding."""
        return self._root < 2 * spec.vocabulary(self.hf_config) * self._hidden

    @cached_property
    def _all(self) -> float:
        return spec.param_count(self.hf_config)

    @cached_property
    def _root(self) -> float:
        return spec.root_params(self.hf_config)

    @cached_property
    def _degrees(self) -> Degrees:
        return choose_degrees(self.config, trainer_ranks(self.config))

    @cached_property
    def _shards(self) -> int:
        return sharing_ranks(self.config)

    @cached_property
    def _hidden(self) -> int:
        return spec.layer_widths(self.hf_config)[0].hidden

    @cached_property
    def _width(self) -> int:
        return BYTES[self.config.trainer.dtype]
