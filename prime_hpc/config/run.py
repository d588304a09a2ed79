"""The root of a run's configuration."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from prime_hpc.config.algorithm import GRPO, AlgorithmConfig
from prime_hpc.config.cluster import ClusterConfig
from prime_hpc.config.env import EnvConfig
from prime_hpc.config.frozen import FrozenModel
from prime_hpc.config.guard import Limit
from prime_hpc.config.inference import InferenceConfig
from prime_hpc.config.lora import LoRAConfig
from prime_hpc.config.loss import DPPOLoss, LossConfig
from prime_hpc.config.optimizer import AdamW, OptimizerConfig
from prime_hpc.config.orchestrator import OrchestratorConfig
from prime_hpc.config.recovery import PauseConfig, RecoveryConfig
from prime_hpc.config.sections import (
    FORBID_UNKNOWN,
    CheckpointConfig,
    LauncherConfig,
    ModelConfig,
    MonitorConfig,
    Positive,
    RunSection,
    StartConfig,
    UpdateConfig,
)
from prime_hpc.config.trainer import TrainerConfig


@dataclass(kw_only=True)
class RunConfig:
    """Everything a run needs."""

    __pydantic_config__ = FORBID_UNKNOWN

    mode: Literal["rl", "sft", "sample", "replay", "serve", "bench", "bench_inference"] = "rl"
    """rl: sample, score and train at once. sft: train on rows of messages. sample: rl without a trainer, so `max_steps`
    batches of the model as it is; without training sources, its evaluation alone. replay: train on what another run
    recorded. serve: engines only. bench: time the trainer on made-up batches and random weights. bench_inference: time
    the engines under made-up requests."""
    run: RunSection = field(default_factory=RunSection)
    """Identity of the run."""
    seed: int = 0
    """Seed of data order, task order and the trainer's generators."""
    max_steps: Positive = 100
    """Optimiser steps."""
    seq_len: Positive = 2048
    """Longest sequence, prompt and replies together, in tokens."""
    resume: str | None = None
    """`latest`, a step, or the path of a checkpoint to go on from; `auto`: `latest`, or anew where there is none."""
    start_from: StartConfig = field(default_factory=StartConfig)
    """Another run's checkpoint that a new run begins from."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """Low-rank adapters."""
    algorithm: AlgorithmConfig = field(default_factory=GRPO)
    """Credit assignment."""
    loss: LossConfig = field(default_factory=DPPOLoss)
    """Policy-gradient loss."""
    optimizer: OptimizerConfig = field(default_factory=AdamW)
    """Optimiser and schedule."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """Environments."""
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    """Engines."""
    frozen: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], FrozenModel] = field(default_factory=dict)
    """Teachers and references by name."""
    update: UpdateConfig = field(default_factory=UpdateConfig)
    """Weight updates."""
    orchestrator: OrchestratorConfig = field(default_factory=OrchestratorConfig)
    """Scheduling and batches."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Trainer ranks."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """Metrics."""
    guard: dict[str, Limit | None] = field(default_factory=dict)
    """Limits on metrics by name, beside the usual ones, of which null removes one."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Machines."""
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    """What happens when a process dies or hangs."""
    pause: PauseConfig = field(default_factory=PauseConfig)
    """How long too many failed episodes, or the guard, may hold the run back."""
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    """Launcher."""

    @property
    def evaluates_alone(self) -> bool:
        """Whether the run has no steps: it evaluates its model and ends."""
        return self.mode == "sample" and not self.env.train

    @property
    def batch_deadline_s(self) -> float:
        """Deadline of the wait for a batch and for what it is made of, an evaluation that holds them up included."""
        return self.trainer.batch_timeout_s + self.env.eval.hold_s
