"""Sections of a run's configuration that several roles share. Docstrings under fields are the reference."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo

FORBID_UNKNOWN = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
ImportPath = Annotated[str, Field(pattern=r"^\w+(\.\w+)+$")]


def _absolute(name: str, facts: ValidationInfo) -> str:
    """`name` below the folder of the launch, if the schema was told that and something lies there."""
    folder: Path | None = (facts.context or {}).get("folder")
    path = os.path.normpath(folder / name) if folder and name else name
    return path if os.path.exists(path) else name


def _absolute_file(name: str, facts: ValidationInfo) -> str:
    """The same for files alone: an image of a registry may lie beside a folder of its name."""
    path = _absolute(name, facts)
    return path if os.path.isfile(path) else name


UserPath = Annotated[str, AfterValidator(_absolute)]
"""A file or folder of the user's. A launch makes it absolute, so that commands find it from anywhere; what does not
exist on this machine stays as it is, as it may on another."""
UserFile = Annotated[str, AfterValidator(_absolute_file)]
"""A `UserPath`, or the name of something that is no file."""


@dataclass(kw_only=True)
class RunSection:
    """Identity of the run."""

    __pydantic_config__ = FORBID_UNKNOWN

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")] | None = None
    """Name of the run and of its directory; made from the experiment, date and a random word when left out."""
    output_dir: str = "outputs"
    """Folder that holds run directories; must be visible from every node."""


@dataclass(kw_only=True)
class ModelConfig:
    """The policy."""

    __pydantic_config__ = FORBID_UNKNOWN

    path: UserPath = ""
    """Directory in Hugging Face layout (config.json, safetensors, tokenizer)."""
    shape: dict[str, Any] = field(default_factory=dict)
    """mode=bench: the contents of a config.json in place of `path`, such as `model=qwen3_1.7b` gives."""
    tokenizer: UserPath | None = None
    """Tokenizer directory; the model's own when left out."""
    renderer: str = "default"
    """How messages become tokens: a name of the `renderers` package; `default` is the tokenizer's chat template."""
    renderer_options: dict[str, Any] = field(default_factory=dict)
    """Options of the renderer, such as `{thinking_retention: all}`; of `default`, variables of the chat template and
    `tool_parser`, `reasoning_parser` (docs/environments.md)."""
    served_name: str = "policy"
    """The model name in requests."""
    impl: Literal["auto", "native", "hf"] = "auto"
    """The trainer's implementation: our own (native), or that of transformers; auto takes native where there is one."""
    freeze_vision: bool = True
    """Of a model that sees: leave its vision tower as it is and train the rest."""


@dataclass(kw_only=True)
class StartConfig:
    """Where a new run begins, if not from `model.path`."""

    __pydantic_config__ = FORBID_UNKNOWN

    path: UserPath | None = None
    """A checkpoint of another run, or that run, whose newest checkpoint it is then: weights (of a run with adapters,
    these) and optimiser states come from there. Steps, schedule, journal and data begin anew."""
    optimizer: bool = True
    """Take the optimiser states too; false begins without."""

    @property
    def words(self) -> str:
        """`PATH without its optimiser states`, where the path is given."""
        return f"{self.path}{'' if self.optimizer else ' without its optimiser states'}"


@dataclass(kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and which are kept. A checkpoint is complete or absent."""

    __pydantic_config__ = FORBID_UNKNOWN

    every: NonNegative = 0
    """Steps between checkpoints; 0 writes one at the end only."""
    keep_last: Positive = 2
    """Newest complete checkpoints that are kept."""
    keep_every: NonNegative = 0
    """Multiples of this step are kept for good; 0 keeps none."""


@dataclass(kw_only=True)
class UpdateConfig:
    """How new weights reach the engines."""

    __pydantic_config__ = FORBID_UNKNOWN

    transport: Literal["auto", "filesystem", "delta", "nccl", "ipc"] = "auto"
    """filesystem: whole files, written by the trainer and read by every engine. delta: what changed since the version
    before, in files; an engine's node holds the weights in memory a second time. nccl: from the trainer's memory to the
    engines' (by gloo where both are on CPUs). ipc: the same between processes on one GPU. auto: nccl where engines and
    trainer have GPUs of their own, ipc where each engine shares its only one with the trainer, filesystem else."""
    kv: Literal["recompute", "keep", "drain"] = "recompute"
    """What happens to requests that run when an update comes: recompute keeps them and drops their KV cache, which is
    exact; keep is fast; drain lets them finish first, for `drain_s` at most."""
    drain_s: Seconds = 60.0
    """kv=drain: what runs longer is kept, and its KV cache is not."""
    timeout_s: Seconds = 300.0
    """Deadline of one update of one engine."""
    stall_s: Seconds = 30.0
    """nccl, ipc: an engine that is not ready for the weights, or takes no more of them, for so long is left behind."""
    bucket_mib: Positive = 256
    """nccl, ipc: size of what is gathered and sent at once."""
    full_every: Positive = 10
    """delta: every so many versions are written whole as well, for engines that start or fell behind."""
    keep_versions: Positive = 2
    """Newest weight versions that stay on disk."""
    canary_every: NonNegative = 0
    """Updates between two checks that engines score a fixed sequence as the trainer does; 0 checks none."""
    canary_bound: Annotated[float, Field(gt=0)] = 0.2
    """Largest mean absolute difference, in nats a token, that passes."""

    @property
    def chosen(self) -> str:
        """The transport that is used; a plan has none that is `auto`."""
        return "filesystem" if self.transport == "auto" else self.transport

    @property
    def streams(self) -> bool:
        """Whether weights go from memory to memory."""
        return self.chosen in ("nccl", "ipc")

    @property
    def ready_s(self) -> float:
        """How long an engine may take to stop sampling before weights are streamed to it."""
        return self.stall_s + (self.drain_s if self.kv == "drain" else 0)


@dataclass(kw_only=True)
class MonitorConfig:
    """What a run tells: where metrics go beside `metrics.jsonl`, rollout records, logs."""

    __pydantic_config__ = FORBID_UNKNOWN

    wandb: Literal["off", "offline", "online"] = "off"
    """offline writes W&B files without a network, to be synced later."""
    wandb_project: str = "prime_hpc"
    """W&B project."""
    wandb_entity: str | None = None
    """W&B team or user."""
    wandb_group: str | None = None
    """W&B group; the name of the sweep, for its points, when left out."""
    wandb_tags: list[str] = field(default_factory=list)
    """W&B tags."""
    wandb_notes: str | None = None
    """W&B notes: what the run is about."""
    rollouts: bool = True
    """Write rollout records to `rollouts/step_N.jsonl.zst`, those of evaluations to the same below
    `rollouts/evaluations/SOURCE`."""
    rollouts_gib: Annotated[float, Field(gt=0)] | None = None
    """Records past this size together are removed, oldest first; all are kept when left out. Each source of
    evaluations has as much for itself."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """What the processes log from this level on; debug lets libraries tell every request too. vLLM has a level of its
    own: `inference.env: {VLLM_LOGGING_LEVEL: DEBUG}`."""
    log_format: Literal["text", "json"] = "text"
    """json: a line is an object. What vLLM and other libraries write by themselves, and the traceback of a process that
    fails, stay text."""


@dataclass(kw_only=True)
class LauncherConfig:
    """How the plan's processes are started."""

    __pydantic_config__ = FORBID_UNKNOWN

    name: Literal["local", "slurm_hetjob", "slurm_single", "slurm_linked", "dry_run"] = "local"
    """local: processes of this machine. slurm_hetjob: one heterogeneous job, a group of nodes for each component.
    slurm_single: one allocation of equal nodes. slurm_linked: engines as a job of their own. dry_run: write the files
    of a run, print its plan, start nothing."""
    target: Literal["local", "slurm_hetjob", "slurm_single", "slurm_linked"] = "local"
    """dry_run: the launcher whose plan is made."""
    submit: bool = True
    """Under Slurm: submit a job. false runs in the allocation around this process, for batch scripts of your own."""
    slot: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")] | None = None
    """Under Slurm: jobs of one slot run one after the other, whichever runs they belong to. Sweeps set it."""
    live: bool = True
    """Show a live view on a terminal; plain lines otherwise."""
    stop_grace_s: Seconds = 10.0
    """Time between SIGTERM and SIGKILL when processes are stopped."""

    @property
    def target_name(self) -> str:
        """The launcher that the plan is made for."""
        return self.target if self.name == "dry_run" else self.name

    @property
    def on_slurm(self) -> bool:
        return self.target_name.startswith("slurm_")
