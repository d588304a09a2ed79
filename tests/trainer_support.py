"""A trainer run on recorded batches, for tests: the run directory that a launcher and an orchestrator would leave."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from safetensors.torch import load_file

from prime_hpc.algorithms.packing import pack
from prime_hpc.cluster import secrets
from prime_hpc.cluster.lease import LeaseKeeper
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.role import Role
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import to_dict
from prime_hpc.plan.run_plan import Fork, ProcessPlan, RunPlan
from prime_hpc.trainer import loop
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.images import images_of
from prime_hpc.transport.messages import BatchRequest, PolicyVersion, RankBatch, Sample, StepReport, decode, encode
from tests.ranks import run_ranks

REPO = Path(__file__).parents[1]
BASE = {
    "seq_len": 64,
    "orchestrator": {"transport": "files"},
    "optimizer": {"lr": 1e-3, "eps": 1e-4, "warmup_steps": 2},
    "trainer": {"device": "cpu", "threads": 1, "batch_timeout_s": 5.0, "head_chunk_tokens": 16},
}


@dataclass(frozen=True)
class TrainerRun:
    """A run directory with a plan for `ranks` trainer ranks."""

    plan: RunPlan

    @property
    def paths(self) -> RunPaths:
        return RunPaths(Path(self.plan.run_dir))

    def record(
        self,
        steps: int,
        *,
        poison: int | None = None,
        samples: Callable[[int], list[Sample]] | None = None,
        images: Mapping[str, bytes] = MappingProxyType({}),
    ) -> "TrainerRun":
        """Write batches 1 to `steps` of `samples`, which show `images`; batch `poison` has advantages that are not a
        number."""
        parallel = self.plan.config["trainer"]["parallel"]
        ranks = len(self.plan.of("trainer")) // (parallel["cp"] * parallel["tp"])
        for step in range(1, steps + 1):
            batch_samples = samples(step) if samples else make_samples(step, nan=step == poison)
            for rank, micro_batches in enumerate(pack(batch_samples, ranks, self.plan.config["seq_len"])):
                batch = RankBatch(step=step, rank=rank, micro_batches=micro_batches, journal_offset=100 * step,
                                  sample_ids=[s.sample_id for s in batch_samples],
                                  images=images_of(micro_batches, images))  # fmt: skip
                path = self.paths.batches / f"step_{step}" / f"rank_{rank}.bin"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"\n".join(encode(batch)))
        return self

    def train(self, *, lease: int | None = None) -> "TrainerRun":
        """Run the only rank in this process, while attempt `lease` (its own when left out) holds the run."""
        with self.supervised(lease):
            try:
                loop.run(Role(self.plan, self.plan.process("trainer-0")))
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
        return self

    def train_in_forks(self) -> "TrainerRun":
        """Run every rank in a process that has imported all already."""
        self.paths.plan.write_bytes(self.plan.dump())
        with self.supervised():
            run_ranks(len(self.plan.of("trainer")), train_rank, self.plan, os.environ["PRIME_HPC_HOME"])
        return self

    def train_in_processes(self) -> "TrainerRun":
        """Run every rank as a process of its own."""
        self.paths.plan.write_bytes(self.plan.dump())
        with self.supervised():
            command = [sys.executable, "-m", "prime_hpc.trainer", str(self.paths.plan), "--process"]
            ranks = [subprocess.Popen([*command, process.name], cwd=REPO, stderr=subprocess.PIPE, text=True,
                                      env={**os.environ, "CUDA_VISIBLE_DEVICES": str(process.index)})
                     for process in self.plan.processes]  # fmt: skip
            logs = [rank.communicate(timeout=300)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(logs)
        return self

    @contextmanager
    def supervised(self, lease: int | None = None) -> Iterator[None]:
        secrets.create(self.paths.root)
        keeper = LeaseKeeper(self.paths.rendezvous, lease or self.plan.attempt, 30.0)
        try:
            yield
        finally:
            keeper.close()

    def weights(self, version: str) -> dict[str, torch.Tensor]:
        return load_file(self.paths.weights_version(version) / "model.safetensors")

    def report(self, step: int) -> StepReport:
        """What rank 0 reported of `step`."""
        request = (self.paths.batches / f"step_{step + 1}" / "request_0.bin").read_bytes()
        message = decode(request.split(b"\n", 1))
        assert isinstance(message, BatchRequest)
        return message.report


def train_rank(rank: int, plan: RunPlan, home: str) -> None:
    """What the process of a rank does. Its home is that of the test, not that of the process it was forked from."""
    os.environ["PRIME_HPC_HOME"] = home
    loop.run(Role(plan, plan.process(f"trainer-{rank}")))


def make_run(
    root: Path,
    model: Path,
    *,
    ranks: int = 1,
    impl: str = "auto",
    freeze_vision: bool = True,
    attempt: int = 1,
    checkpoint_path: Path | None = None,
    forks: list[Fork] | None = None,
    **overrides: Any,
) -> TrainerRun:
    """A run at `root` that trains `model`; `overrides` are sections of the configuration."""
    policy = {"path": str(model), "impl": impl, "freeze_vision": freeze_vision}
    config = OmegaConf.merge(to_dict(RunConfig()), BASE, {"model": policy}, overrides)
    processes = [ProcessPlan(name=f"trainer-{rank}", component="trainer", index=rank, node=0, command=[], log="")
                 for rank in range(ranks)]  # fmt: skip
    for directory in ("rendezvous/acks", "weights", "checkpoints"):
        (root / directory).mkdir(parents=True, exist_ok=True)
    return TrainerRun(RunPlan(name="test", run_dir=str(root), attempt=attempt, nodes=1, forks=forks or [],
                              checkpoint=str(checkpoint_path) if checkpoint_path else None, processes=processes,
                              config=OmegaConf.to_container(config)))  # fmt: skip


def make_samples(step: int, *, count: int = 6, nan: bool = False) -> list[Sample]:
    """Samples of 8 to 20 tokens over the tiny model's letters, sampled by the version before `step`."""
    rng = np.random.default_rng(step)
    samples = []
    for i in range(count):
        n = int(rng.integers(8, 21))
        mask = np.arange(n) >= n // 2
        samples.append(Sample(
            sample_id=f"{step}.{i}",
            source="words",
            token_ids=Array.of(rng.integers(4, 30, n), "i4"),
            mask=Array.of(mask, "bool"),
            logprobs=Array.of(np.where(mask, rng.normal(-3.4, 0.1, n), 0.0), "f4"),
            versions=Array.of(np.where(mask, PolicyVersion(0, step - 1).pack(), -1), "i8"),
            advantages=Array.of(np.full(n, np.nan if nan else rng.normal()), "f4"),
        ))  # fmt: skip
    return samples
