"""What a run puts on the shared filesystem: pure functions of the configuration and of config.json."""

from dataclasses import dataclass

from prime_hpc.config.run import RunConfig
from prime_hpc.models import spec
from prime_hpc.models.spec import HFConfig
from prime_hpc.plan.peak import BYTES, MASTER, MOMENTS, trained_params
from prime_hpc.plan.workload import Workload

RECORD_BYTES = 6.0
"""Of a token in compressed rollout records and the journal, about."""


@dataclass(frozen=True)
class Disk:
    """Bytes: of one checkpoint and one weight version, and how many of each lie there at once at most."""

    checkpoint: float
    checkpoints: int
    version: float
    versions: int
    model: float
    records: float

    @property
    def total(self) -> float:
        return self.checkpoint * self.checkpoints + self.version * self.versions + self.model + self.records


def disk_use(config: RunConfig, hf_config: HFConfig, workload: Workload) -> Disk:
    """Checkpoints hold parameters that train and their moments in float32, weight versions the published dtype. One
    more of each exists while the next one is written; one more version while a slow engine still reads it. A bench of
    the trainer keeps nothing."""
    if config.mode == "bench":
        return Disk(checkpoint=0, checkpoints=0, version=0, versions=0, model=0, records=0)
    keep, parameters, serves = config.checkpoint, spec.param_count(hf_config), config.mode == "rl"
    published = config.trainer.dtype if config.trainer.publish_dtype == "auto" else config.trainer.publish_dtype
    version = BYTES[published] * parameters
    saves = 1 + (config.max_steps // keep.every if keep.every else 0)
    kept_for_good = config.max_steps // keep.keep_every if keep.every and keep.keep_every else 0
    records = RECORD_BYTES * workload.tokens * config.orchestrator.batch_size * config.max_steps if serves else 0.0
    return Disk(
        checkpoint=MASTER * trained_params(config, hf_config) * (1 + MOMENTS[config.optimizer.name]),
        checkpoints=min(saves, keep.keep_last + kept_for_good + 1),
        version=version,
        versions=config.update.keep_versions + 2 if serves else 0,
        model=version,
        records=min(records, (config.monitor.rollouts_gib or float("inf")) * 2**30),
    )
