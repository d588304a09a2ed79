"""Configuration of environments: where tasks come from and how episodes run."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from prime_hpc.config.algorithm import AlgorithmConfig
from prime_hpc.config.curriculum import Shuffled, TaskSampling
from prime_hpc.config.sections import FORBID_UNKNOWN, Fraction, NonNegative, Positive, Seconds, UserFile


@dataclass(kw_only=True)
class SamplingConfig:
    """Sampling parameters of a source."""

    __pydantic_config__ = FORBID_UNKNOWN

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; training wants 1.0, since the trainer scores the full distribution."""
    top_k: Positive | None = None
    """Sample from so many most probable tokens; all when left out, as training wants it."""
    min_p: Fraction | None = None
    """Leave out tokens less probable than this share of the most probable one's; none when left out, as training
    wants it."""
    max_tokens: Positive | None = None
    """Tokens of one reply; until the context is full when left out."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a reply, which keeps them."""
    seed: int | None = None
    """Sample each rollout of a task from a seed of its own that follows from this one, the task and its number; at
    random when left out. Agents of an episode that see the same prompt then say the same."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further parameters by vLLM's names, e.g. `{min_tokens: 4, repetition_penalty: 1.1}`."""


@dataclass(kw_only=True)
class RuntimeConfig:
    """Where the programs of episodes run (docs/environments.md)."""

    __pydantic_config__ = FORBID_UNKNOWN

    name: Literal["subprocess", "apptainer", "docker", "podman"] = "subprocess"
    """`subprocess` runs them beside the worker, each in a folder of its own but not isolated."""
    image: UserFile | None = None
    """Of a container: a file (SIF), or a reference that is pulled once; by the task, if it says, when left out."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further fields of the verifiers runtime, e.g. `{cpu: 2, memory: 4}` (cores, GB)."""


@dataclass(kw_only=True)
class TaskSource:
    """One stream of tasks, trained on or evaluated: a verifiers environment by id."""

    __pydantic_config__ = FORBID_UNKNOWN

    id: str
    """Importable module of a verifiers taskset (or environment), e.g. `prime_hpc.envs.reverse_text`."""
    name: str | None = None
    """Name in metrics; the last part of the id when left out. Names are unique."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the taskset."""
    env_args: dict[str, Any] = field(default_factory=dict)
    """Further fields of the verifiers environment config, e.g. `agent: {max_turns: 4}`."""
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    """Where the programs of its episodes run, unless a seat in `env_args` names a runtime of its own."""
    num_tasks: Positive | None = None
    """Use only the first tasks of the taskset."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Sampling parameters."""
    adapter: str | None = None
    """The adapter of `lora.adapters` that this source samples from, and trains; the first when left out."""


@dataclass(kw_only=True)
class SourceConfig(TaskSource):
    """One stream of tasks that the policy is trained on: a verifiers environment by id."""

    ratio: Annotated[float, Field(gt=0)] = 1.0
    """Share of this source among the training sources, counted in groups."""
    ratio_schedule: dict[NonNegative, Annotated[float, Field(ge=0)]] = field(default_factory=dict)
    """Shares by step in place of `ratio`, linear between the steps given and constant outside them."""
    order: TaskSampling = field(default_factory=Shuffled)
    """Which of its tasks comes next."""
    algorithm: AlgorithmConfig | None = None
    """Credit assignment of this source; the run's when left out."""
    group_size: Positive | None = None
    """Rollouts of one task of this source; `orchestrator.group_size` when left out."""


@dataclass(kw_only=True)
class EvalSourceConfig(TaskSource):
    """One stream of tasks that the policy is evaluated on: a verifiers environment by id."""

    every: NonNegative | None = None
    """Steps between evaluations of this source; `env.eval.every` when left out."""
    rollouts_per_task: Positive | None = None
    """Rollouts of each task of this source; `env.eval.rollouts_per_task` when left out."""


@dataclass(kw_only=True)
class EvalConfig:
    """Evaluation during training, or alone: with mode=sample and no training source."""

    __pydantic_config__ = FORBID_UNKNOWN

    every: NonNegative = 0
    """Steps between evaluations; 0 evaluates at the end only, where there are sources. A run that trains nothing
    does so once, whatever is said here."""
    every_s: Seconds | None = None
    """Seconds between evaluations of a source, beside `every`: the first version after them is evaluated."""
    hold_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds for which weight updates wait for an evaluation, at most, so that one version plays all of its episodes;
    the deadline for batches grows by as much. 0: engines are updated meanwhile, and episodes go on under newer versions
    (docs/environments.md)."""
    rollouts_per_task: Positive = 1
    """Rollouts of each task."""
    at_start: bool = False
    """Evaluate the base model, too."""
    sources: list[EvalSourceConfig] = field(default_factory=list)
    """What is evaluated."""


@dataclass(kw_only=True)
class EnvConfig:
    """Training and evaluation sources and the workers that run their episodes."""

    __pydantic_config__ = FORBID_UNKNOWN

    train: list[SourceConfig] = field(default_factory=list)
    """Training sources."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation sources."""
    workers: Positive = 2
    """Worker processes of each training source; an evaluation source has one, or as many where nothing is trained."""
    rollouts_per_worker: Positive = 128
    """Episodes that one worker runs at once."""
    rollout_timeout_s: Seconds = 600.0
    """Hard limit of one episode; past it the episode is an environment error and its worker may be replaced."""
    start_timeout_s: Seconds = 300.0
    """Deadline for a worker to load its environment."""
    retries: NonNegative = 2
    """Times an episode that failed for no fault of its own (inference or infrastructure) is run again."""
    error_budget: Fraction = 0.5
    """Share of environment errors among the last 100 episodes of a source past which it pauses."""
    scoring_timeout_s: Seconds = 120.0
    """Hard limit of scoring, within that of the episode; `env_args: {agent: {timeout: {scoring: ...}}}` goes before."""
