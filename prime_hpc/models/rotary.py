"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and the ways to stretch it to longer contexts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of the angles of n tokens, each [n, 1, r]; the first r channels of a head are turned."""
Parameters = dict[str, Any]
"""`rope_parameters` of a Hugging Face configuration."""


@dataclass
class Rotary:
    """Angles of positions: position times `frequencies` float32[r / 2]. `magnitude` scales cosine and sine."""

    frequencies: Tensor
    magnitude: float

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Rotary":
        """As `rope_parameters`, `head_dim` and `max_position_embeddings` of a configuration say."""
        parameters: Parameters = config.rope_parameters
        rotated = getattr(config, "qk_rope_head_dim", None)  # latent attention: the heads' rotary part is apart
        rotated = rotated or int(head_dim_of(config) * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32, device="cpu") / rotated
        frequencies = 1.0 / parameters["rope_theta"] ** exponents
        stretch = _STRETCHES[parameters["rope_type"]]
        return cls(stretch(frequencies, parameters), _magnitude(parameters))

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Rotation of tokens at `positions` int64[n], computed in float32."""
        self.frequencies = self.frequencies.to(positions.device)
        angles = (positions[:, None].float() * self.frequencies).repeat(1, 2)[:, None]
        return (angles.cos() * self.magnitude).to(dtype), (angles.sin() * self.magnitude).to(dtype)


def head_dim_of(config: PreTrainedConfig) -> int:
    """Channels of a head; not every configuration names them."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn channel i of the first r together with channel i + r/2, and leave the others.

    Args:
        x: [n, heads, d].
    """
    cos, sin = rotation
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def rotate_pairs(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn channel 2i of the first r together with channel 2i + 1. They come out as `rotate` has them, which is the
    same for a query and a key that are multiplied."""
    r = rotation[0].shape[-1]
    turned, rest = x.split([r, x.shape[-1] - r], dim=-1)
    apart = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return rotate(torch.cat([apart, rest], dim=-1), rotation)


def latent_scale(parameters: Parameters) -> float:
    """YaRN's temperature of latent attention, which lies in the scale of the scores (as DeepSeek-V3 has it)."""
    weight = parameters.get("mscale_all_dim") if parameters["rope_type"] == "yarn" else None
    return _temperature(parameters["factor"], weight) ** 2 if weight else 1.0


def _keep(frequencies: Tensor, parameters: Parameters) -> Tensor:
    return frequencies


def _stretch_linearly(frequencies: Tensor, parameters: Parameters) -> Tensor:
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595)."""
    return frequencies / parameters["factor"]


def _stretch_llama3(frequencies: Tensor, parameters: Parameters) -> Tensor:
    """Llama 3.1: slow channels are stretched, fast ones kept, those between mixed by their turns in the old context."""
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    slow, fast = parameters["low_freq_factor"], parameters["high_freq_factor"]
    return _mix(frequencies, ((turns - slow) / (fast - slow)).clamp(0, 1), parameters["factor"])


def _stretch_by_yarn(frequencies: Tensor, parameters: Parameters) -> Tensor:
    """NTK-by-parts of YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2), with its ramp over channels."""
    context, base = parameters["original_max_position_embeddings"], parameters["rope_theta"]
    channels = len(frequencies)

    def channel_of(turns: float) -> float:
        return channels * math.log(context / (turns * 2 * math.pi)) / math.log(base)

    fast = channel_of(parameters.get("beta_fast") or 32)
    slow = channel_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, 2 * channels - 1)
    ramp = (torch.arange(channels, dtype=torch.float32, device="cpu") - fast) / max(slow - fast, 1e-3)
    return _mix(frequencies, 1 - ramp.clamp(0, 1), parameters["factor"])


def _mix(frequencies: Tensor, kept: Tensor, factor: float) -> Tensor:
    """The share `kept` of each frequency, and the rest of it stretched."""
    return frequencies * kept + frequencies / factor * (1 - kept)


def _magnitude(parameters: Parameters) -> float:
    """YaRN's temperature of the attention (section 3.4), which lies in cosine and sine; 1 for the others."""
    if parameters["rope_type"] != "yarn":
        return 1.0
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    numerator, denominator = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if numerator and denominator:
        return _temperature(parameters["factor"], numerator) / _temperature(parameters["factor"], denominator)
    return _temperature(parameters["factor"], 1.0)


def _temperature(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


_STRETCHES: dict[str, Callable[[Tensor, Parameters], Tensor]] = {
    "default": _keep,
    "linear": _stretch_linearly,
    "llama3": _stretch_llama3,
    "yarn": _stretch_by_yarn,
}
