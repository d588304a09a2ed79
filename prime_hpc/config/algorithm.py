"""Configuration of credit assignment: from the rewards of a group to advantages (docs/algorithms.md)."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from prime_hpc.config.sections import FORBID_UNKNOWN, ImportPath, NonNegative, Positive

Weight = Annotated[float, Field(ge=0)]


@dataclass(kw_only=True)
class LinearLengthPenalty:
    """Takes a share of the group's mean reward in proportion to a rollout's length."""

    __pydantic_config__ = FORBID_UNKNOWN

    name: Literal["linear"] = "linear"
    """The penalty."""
    output_weight: Weight = 0.25
    """Share for sampled tokens, at the longest of the group."""
    input_weight: Weight = 0.1
    """Share for tokens that were not sampled."""
    turn_weight: Weight = 0.1
    """Share for turns."""


@dataclass(kw_only=True)
class OverlongPenalty:
    """Falls from 0 to -1 over the last `cache` tokens before `limit` (DAPO's soft overlong punishment)."""

    __pydantic_config__ = FORBID_UNKNOWN

    name: Literal["overlong"] = "overlong"
    """The penalty."""
    limit: Positive
    """Sampled tokens from which on the penalty is -1."""
    cache: Positive
    """Tokens over which it falls."""


LengthPenalty = Annotated[LinearLengthPenalty | OverlongPenalty, Field(discriminator="name")]


@dataclass(kw_only=True)
class RepetitionFilter:
    """Finds a reply that has run into a loop: many near-certain tokens in a row."""

    __pydantic_config__ = FORBID_UNKNOWN

    window: Positive = 3000
    """Tokens in a row."""
    probability: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """A token counts if it was sampled with more than this probability."""


@dataclass(kw_only=True)
class GibberishFilter:
    """Finds a reply with a token that is rare in any text and was most improbable here."""

    __pydantic_config__ = FORBID_UNKNOWN

    token_id: NonNegative = 100_000
    """A token id from this on is rare: byte-pair vocabularies are numbered by frequency."""
    logprob: Annotated[float, Field(lt=0)] = -14.0
    """Most improbable is a log-probability below this; uniform sampling from 150 000 tokens gives -11.9."""


@dataclass(kw_only=True)
class DifficultyFilter:
    """Leaves out groups whose task is too hard or too easy now."""

    __pydantic_config__ = FORBID_UNKNOWN

    min_reward: float | None = None
    """Leaves out a group whose mean reward is at most this."""
    max_reward: float | None = None
    """Leaves out a group whose mean reward is at least this."""


@dataclass(kw_only=True)
class Filters:
    """What does not train although it was sampled. A filtered rollout still counts in its group's baseline."""

    __pydantic_config__ = FORBID_UNKNOWN

    truncated: bool = False
    """Leave out rollouts that a length limit cut."""
    repetition: RepetitionFilter | None = None
    """Leave out rollouts that repeat themselves."""
    gibberish: GibberishFilter | None = None
    """Leave out rollouts with gibberish."""
    difficulty: DifficultyFilter | None = None
    """Leave out whole groups by their mean reward."""


@dataclass(kw_only=True)
class Credit:
    """What every algorithm has."""

    __pydantic_config__ = FORBID_UNKNOWN
    compares_group: ClassVar[bool] = True
    """Whether a group of one rollout has no advantage."""
    component: ClassVar[Literal["rl", "ce", "ref_kl"]] = "rl"
    """The loss component of sampled tokens."""

    length_penalty: LengthPenalty | None = None
    """Changes rewards before they become advantages; recorded rewards stay as they are."""
    echo: dict[Literal["system", "user", "assistant", "tool"], Annotated[float, Field(gt=0)]] = field(
        default_factory=dict
    )
    """Cross-entropy weight of tokens that the environment said, by role of the message, e.g. `{tool: 0.1}`."""
    filters: Filters = field(default_factory=Filters)
    """What does not train."""


@dataclass(kw_only=True)
class GRPO(Credit):
    """Reward minus the group's mean."""

    name: Literal["grpo"] = "grpo"
    """The algorithm."""
    std: bool = False
    """Divide by the group's standard deviation."""


@dataclass(kw_only=True)
class MaxRL(Credit):
    """Reward minus the group's mean, divided by the mean."""

    name: Literal["max_rl"] = "max_rl"
    """The algorithm."""


@dataclass(kw_only=True)
class RLOO(Credit):
    """Reward minus the mean of the group's other rollouts."""

    name: Literal["rloo"] = "rloo"
    """The algorithm."""


@dataclass(kw_only=True)
class ReinforcePlusPlus(Credit):
    """Rewards less a baseline, normalised over the source's rollouts in the batch."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    """The algorithm."""
    compares_group: ClassVar[bool] = False
    baseline: Literal["group", "batch"] = "group"
    """Whose mean is taken off the reward."""


@dataclass(kw_only=True)
class RAE(Credit):
    """Self-play: reward minus a running mean of each agent's own rewards."""

    name: Literal["rae"] = "rae"
    """The algorithm."""
    compares_group: ClassVar[bool] = False
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Share of the old baseline in the new one."""


@dataclass(kw_only=True)
class HierarchicalGRPO(Credit):
    """Several agents: reward minus the mean of the agent's peers, in the group or within the episode."""

    name: Literal["hierarchical_grpo"] = "hierarchical_grpo"
    """The algorithm."""
    compares_group: ClassVar[bool] = False
    episode_agents: Annotated[list[str], Field(min_length=1)]
    """Agents that play several times in an episode and are compared within it; others are compared over the group."""


@dataclass(kw_only=True)
class OPD(Credit):
    """On-policy distillation: the policy samples, a teacher scores every token (the reference KL is the loss)."""

    name: Literal["opd"] = "opd"
    """The algorithm."""
    compares_group: ClassVar[bool] = False
    component: ClassVar[Literal["rl", "ce", "ref_kl"]] = "ref_kl"
    teacher: str
    """Name of a `frozen` model."""


@dataclass(kw_only=True)
class OPSD(Credit):
    """On-policy self-distillation: the teacher is the policy itself, which has seen a demonstration."""

    name: Literal["opsd"] = "opsd"
    """The algorithm."""
    compares_group: ClassVar[bool] = False
    component: ClassVar[Literal["rl", "ce", "ref_kl"]] = "ref_kl"
    demonstration: str = "demonstration"
    """Field of the task's data, or of the trace's `info`, that holds the demonstration."""
    template: Annotated[str, Field(pattern=r"\{demonstration\}")] = "An expert answered so:\n{demonstration}"
    """What the teacher sees before the conversation."""
    role: Literal["system", "user"] = "system"
    """Who says it."""


@dataclass(kw_only=True)
class Distillation(Credit):
    """Hard distillation: a teacher samples, the policy learns its tokens by cross-entropy."""

    name: Literal["sft"] = "sft"
    """The algorithm."""
    compares_group: ClassVar[bool] = False
    component: ClassVar[Literal["rl", "ce", "ref_kl"]] = "ce"
    teacher: str
    """Name of a `frozen` model."""


@dataclass(kw_only=True)
class CustomAlgorithm(Credit):
    """A function of yours, called once a batch."""

    name: Literal["custom"] = "custom"
    """The algorithm."""
    compares_group: ClassVar[bool] = False
    import_path: ImportPath
    """`module.function` from groups of `Trajectory` to their advantages."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the function."""


AlgorithmConfig = Annotated[
    GRPO | MaxRL | RLOO | ReinforcePlusPlus | RAE | HierarchicalGRPO | OPD | OPSD | Distillation | CustomAlgorithm,
    Field(discriminator="name"),
]
