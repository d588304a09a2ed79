"""How many ways parallelism divides the trainer's ranks and a model. Importing this module needs no torch."""

from dataclasses import dataclass, replace
from math import gcd

from prime_hpc.config.json_files import hf_config_of
from prime_hpc.config.run import RunConfig
from prime_hpc.config.sizes import trainer_ranks, trainer_size
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.models import families
from prime_hpc.models.spec import Divisions, HFConfig, divisions, linear_layers
from prime_hpc.models.traits import ELSEWHERE, has_windows, needs_eager, runs_one_by_one, text_of

KEY = "trainer.parallel"
DEEPEP_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Sizes of groups that DeepEP has settings for."""
DEEPEP_NODE = 8
"""Ranks of a group that share a node, as DeepEP has it where there are more."""


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Sizes of the dimensions of the trainer's mesh: ranks = dp_replicate * dp_shard * cp * tp. Experts are divided
    among ep of the dp_shard * cp ranks that share a copy of the model."""

    dp_replicate: int = 1
    """Whole copies of the sharded model."""
    dp_shard: int = 1
    """Ranks, or groups of them, with other rows that share one copy."""
    cp: int = 1
    """Ranks that divide a row."""
    tp: int = 1
    """Ranks that divide attention heads and channels of dense MLPs."""
    ep: int = 1
    """Ranks that divide experts."""

    @property
    def dp(self) -> int:
        """Numbers of different rows at a time."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks that share a copy of the parameters."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Ranks that share a copy of an expert."""
        return self.fsdp // self.ep


def choose_degrees(config: RunConfig, ranks: int) -> Degrees:
    """The degrees of a run over `ranks` trainer ranks; `ep=auto` becomes the largest that is legal within a node.

    Raises:
        ConfigurationError: they do not divide the ranks or the model.
    """
    degrees, problems = _settle(config, ranks)
    if problems:
        raise ConfigurationError(problems)
    return degrees


def find_parallel_problems(config: RunConfig) -> list[ConfigProblem]:
    """Degrees of the trainer and of the engines that do not divide the ranks or the model, with those that do."""
    trainer = [] if config.mode == "serve" else _settle(config, trainer_ranks(config))[1]
    return trainer + (_engine_problems(config) if config.mode in ("rl", "serve", "sample") else [])


def _engine_problems(config: RunConfig) -> list[ConfigProblem]:
    hf_config, degree = hf_config_of(config.model), config.inference.vllm.get("tensor_parallel_size", 1)
    heads = text_of(hf_config or {}).get("num_attention_heads", degree)
    if not isinstance(degree, int) or degree < 1 or heads % degree == 0:
        return []
    expected = f"{_list(_divisors(heads))}, which divide the {heads} attention heads"
    return [ConfigProblem("inference.vllm.tensor_parallel_size", degree, expected)]


def _settle(config: RunConfig, ranks: int) -> tuple[Degrees, list[ConfigProblem]]:
    """Each degree is judged given those before it; one that is refused counts as 1 for the others."""
    parallel, problems = config.trainer.parallel, []
    model = _Model.of(config)

    def accept(name: str, legal: list[int], given: str) -> int:
        value = getattr(parallel, name)
        if value in legal:
            return value
        problems.append(ConfigProblem(f"{KEY}.{name}", value, f"{_list(legal)}, which {given} allow{model.limits}"))
        return 1

    tp = accept("tp", model.legal_tp(ranks), f"{ranks} ranks")
    cp = accept("cp", model.legal_cp(ranks // tp, tp, parallel.cp_style), f"{ranks} ranks with tp={tp}")
    rows = ranks // (tp * cp)
    copies = accept("dp_replicate", _divisors(rows), f"{ranks} ranks with tp={tp}, cp={cp}")
    degrees = Degrees(dp_replicate=copies, dp_shard=rows // copies, cp=cp, tp=tp)
    legal, per_node, given = model.legal_ep(degrees.fsdp), trainer_size(config).per_node, ""
    if parallel.ep_dispatch == "deepep":
        legal = [ep for ep in legal if _reached_by_deepep(ep, tp, per_node)]
        given = f" with ep_dispatch=deepep, tp={tp} and {per_node} ranks a node"
    if parallel.ep == "auto":
        return replace(degrees, ep=max(ep for ep in legal if ep <= max(per_node // tp, 1))), problems
    return replace(degrees, ep=accept("ep", legal, f"{degrees.fsdp} ranks that share a copy{given}")), problems


@dataclass(frozen=True)
class _Model:
    """What a model allows. Without its config.json only the ranks are known."""

    sizes: Divisions | None
    native: bool
    sees: bool
    packs_by_ourselves: bool
    adapted: bool
    """It trains adapters."""
    experts_adapted: bool
    latent: bool = False
    """Its attention is latent: all heads read what one projection makes."""
    recurs: bool = False
    """A state goes from token to token, so that whole rows and all channels stay on a rank."""

    @classmethod
    def of(cls, config: RunConfig) -> "_Model":
        lora = config.lora
        experts_adapted = lora.on and "experts" in lora.targets
        hf_config: HFConfig | None = hf_config_of(config.model)
        if hf_config is None or hf_config.get("model_type") in ELSEWHERE:
            return cls(None, True, False, True, lora.on, experts_adapted)
        native = families.choose_implementation(config, hf_config) == "native"
        sees = hf_config.get("model_type") in families.SEEING
        masks = has_windows(hf_config) or runs_one_by_one(hf_config) or needs_eager(hf_config) is not None
        packs_by_ourselves = config.trainer.attn != "eager" and (native or not masks)
        recurs = native and linear_layers(hf_config) > 0
        return cls(divisions(hf_config), native, sees, packs_by_ourselves, lora.on, experts_adapted,
                   bool(hf_config.get("kv_lora_rank")), recurs)  # fmt: skip

    @property
    def limits(self) -> str:
        """What beside the ranks limits the degrees."""
        if self.sizes is None:
            return ""
        sizes = self.sizes
        if self.sees:
            return " for a model that sees, which has neither cp nor tp nor ep"
        if not self.native:
            why = "" if self.packs_by_ourselves else ", nor cp with windows, states between tokens or eager attention"
            return f" for a model of transformers, which has neither tp nor ep{why}"
        experts = f", {sizes.experts} experts of width {sizes.expert_width}" if sizes.experts else ""
        others = "; latent attention takes no tp" if self.latent else ""
        others += "; adapters take no tp, nor ep where they update experts" if self.adapted else ""
        others += "; linear attention takes neither cp nor tp" if self.recurs else ""
        return f" for {sizes.heads} heads, {sizes.kv_heads} KV heads, MLPs of width {sizes.widths}{experts}{others}"

    def legal_tp(self, ranks: int) -> list[int]:
        if not self.native or self.adapted or self.latent or self.recurs:
            return [1]
        sizes = self.sizes
        whole = [] if sizes is None else [sizes.heads, sizes.kv_heads, *sizes.widths]
        return [n for n in _divisors(ranks) if all(size % n == 0 for size in whole)]

    def legal_cp(self, ranks: int, tp: int, style: str) -> list[int]:
        if self.sees or self.recurs or not self.packs_by_ourselves:
            return [1]
        return [n for n in _divisors(ranks) if style == "ring" or self._exchanges_heads(n, tp)]

    def _exchanges_heads(self, cp: int, tp: int) -> bool:
        """Whether every rank gets as many query heads as others, with the key and value heads that they read."""
        if self.sizes is None:
            return True
        heads, kv_heads = self.sizes.heads // tp, self.sizes.kv_heads // tp
        copies = cp // gcd(kv_heads, cp)
        return heads % cp == 0 and heads % (kv_heads * copies) == 0

    def legal_ep(self, ranks: int) -> list[int]:
        """Experts are divided evenly, and what one of them is sharded over divides its matrices."""
        if not self.native or self.experts_adapted or (self.sizes and not self.sizes.experts):
            return [1]
        sizes = self.sizes
        return [n for n in _divisors(ranks) if n == 1 or sizes is None or _divides_experts(sizes, n, ranks // n)]


def _divides_experts(sizes: Divisions, ep: int, shards: int) -> bool:
    return sizes.experts % ep == 0 and any(size % shards == 0 for size in (sizes.hidden, sizes.expert_width))


def _reached_by_deepep(ep: int, tp: int, per_node: int) -> bool:
    """Whether ranks that divide experts are neighbours in one node, or all of whole nodes."""
    if ep == 1:
        return True
    within = per_node % ep == 0 if ep <= DEEPEP_NODE else per_node == DEEPEP_NODE
    return tp == 1 and ep in DEEPEP_RANKS and within


def _list(legal: list[int]) -> str:
    return f"{'one of ' * (len(legal) > 1)}{', '.join(map(str, legal))}"


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
