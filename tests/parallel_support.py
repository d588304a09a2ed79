"""One optimiser step's worth of work of a trainer under any division of model and batch, for tests."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from prime_hpc.algorithms.packing import pack
from prime_hpc.config.loss import GSPOLoss
from prime_hpc.config.run import RunConfig
from prime_hpc.config.trainer import ParallelConfig
from prime_hpc.models.degrees import choose_degrees
from prime_hpc.trainer.distributed import World
from prime_hpc.trainer.hf_weights import load_weights
from prime_hpc.trainer.loop import forward_backward
from prime_hpc.trainer.model import build_policy
from prime_hpc.trainer.parallel.clip import clip_gradients
from prime_hpc.trainer.parallel.mesh import Mesh
from prime_hpc.transport.messages import PolicyVersion, RankBatch
from tests.trainer_support import make_samples

SAMPLES = (7, 3)
"""Samples of two batches of uneven rows; the second leaves a rank of four without any."""
ROW_TOKENS = 37


def open_world(rank: int, ranks: int, store: Path, config: RunConfig) -> World:
    """The world of a process that takes part in `ranks` ranks on the CPU."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    mesh = Mesh.of("cpu", choose_degrees(config, ranks))
    return World(rank, ranks, torch.device("cpu"), mesh, dist.group.WORLD)


def accumulate(rank: int, ranks: int, store: Path, model: Path, impl: str, sequence_loss: bool,
               parallel: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
    """Losses of both batches, the gradients of their sum by the names of the checkpoint, their norm, and the metrics
    of the experts."""
    config = RunConfig()
    config.model.path, config.model.impl = str(model), impl
    config.trainer.head_chunk_tokens = 5
    config.trainer.parallel = ParallelConfig(**parallel)
    config.loss = GSPOLoss() if sequence_loss else config.loss
    world = open_world(rank, ranks, store, config)
    policy = build_policy(config, world)
    load_weights(policy, model)
    losses = []
    for step, count in enumerate(SAMPLES, start=1):
        micro_batches = pack(make_samples(step, count=count), world.dp_size, ROW_TOKENS)[world.dp_rank]
        batch = RankBatch(step=step, rank=world.dp_rank, micro_batches=micro_batches, sample_ids=[], journal_offset=0)
        role = SimpleNamespace(config=config)
        losses.append(forward_backward(policy, batch, role, world, PolicyVersion(0, step - 1)).loss)
    gradients: dict[str, np.ndarray] = {}
    for name, parameter in policy.named_parameters():
        whole = policy.conversion.to_hf(name, parameter.grad.full_tensor())
        gradients |= {hf_name: gradient.numpy().copy() for hf_name, gradient in whole.items()}
    norm = clip_gradients(list(policy.parameters()), 0.5)
    clipped = clip_gradients(list(policy.parameters()), None)
    return {"losses": losses, "gradients": gradients, "norm": norm, "clipped": clipped,
            "experts": policy.balance_experts(0.0)}  # fmt: skip
