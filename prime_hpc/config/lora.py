"""Configuration of low-rank adapters."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from prime_hpc.config.sections import FORBID_UNKNOWN, NonNegative

AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "experts", "in_proj_qkv",
                 "in_proj_z", "out_proj"]  # fmt: skip


@dataclass(kw_only=True)
class LoRAConfig:
    """Low-rank adapters: the weights of the model stay as they are, and only an update of rank `rank` is trained."""

    __pydantic_config__ = FORBID_UNKNOWN

    rank: NonNegative = 0
    """Rank of an update; 0 trains all weights and no adapter."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """An update is scaled by alpha / rank."""
    targets: list[Target] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "experts"]
    )
    """Matrices that get one, by the last part of their name; `experts` are those of a mixture of experts, and
    `in_proj_qkv`, `in_proj_z` and `out_proj` those of linear attention."""
    adapters: list[AdapterName] = field(default_factory=lambda: ["default"])
    """Adapters that are trained at once, each on the sources that name it (`env.train[].adapter`)."""
    serve: Literal["adapter", "merged"] = "adapter"
    """What the engines get. adapter: the adapters alone, for vLLM to apply. merged: whole weights with the only one."""

    @property
    def on(self) -> bool:
        return self.rank > 0

    @property
    def served(self) -> list[str]:
        """Adapters that the engines know by name, in the order of their numbers there."""
        return sorted(self.adapters) if self.on and self.serve == "adapter" else []
