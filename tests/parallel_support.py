"""One optimiser step's worth of work of a trainer under any division of model and batch, for tests."""

import errno
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from prime_hpc.algorithms.packing import pack
from prime_hpc.config.loss import GSPOLoss
from prime_hpc.config.run import RunConfig
from prime_hpc.config.trainer import ParallelConfig
from prime_hpc.models.attention import open_attention
from prime_hpc.models.degrees import choose_degrees
from prime_hpc.models.moe import MixtureOfExperts, Routing
from prime_hpc.trainer import weights_files
from prime_hpc.trainer.bench import initialise
from prime_hpc.trainer.distributed import World
from prime_hpc.trainer.hf_weights import load_weights, local_part
from prime_hpc.trainer.loop import forward_backward
from prime_hpc.trainer.low_precision import use_fp8_in_experts
from prime_hpc.trainer.measure import Stopwatch
from prime_hpc.trainer.model import build_policy
from prime_hpc.trainer.optim import WHOLE
from prime_hpc.trainer.parallel.clip import clip_gradients
from prime_hpc.trainer.parallel.collectives import sum_over
from prime_hpc.trainer.parallel.context import ContextParallel
from prime_hpc.trainer.parallel.experts import Journey
from prime_hpc.trainer.parallel.mesh import Mesh
from prime_hpc.trainer.parallel.shard import divide_blocks
from prime_hpc.trainer.row import PackedRow
from prime_hpc.transport.messages import PolicyVersion, RankBatch
from prime_hpc.transport.weights import Delta, WeightsManifest, write_manifest
from tests import standins
from tests.trainer_support import make_samples

SAMPLES = (7, 3)
"""Samples of two batches of uneven rows; the second leaves a rank of four without any."""
ROW_TOKENS = 37
STANDINS = str(Path(standins.__file__).parent)


def open_world(rank: int, ranks: int, store: Path, config: RunConfig) -> World:
    """The world of a process that takes part in `ranks` ranks on the CPU."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    mesh = Mesh.of("cpu", choose_degrees(config, ranks))
    return World(rank, ranks, torch.device("cpu"), mesh, dist.group.WORLD)


def accumulate(rank: int, ranks: int, store: Path, model: Path, impl: str, sequence_loss: bool,
               parallel: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
    """Losses of both batches, the gradients of their sum, the norm of these, and the metrics of the experts."""
    config = RunConfig()
    config.model.path, config.model.impl = str(model), impl
    config.trainer.ranks, config.trainer.head_chunk_tokens = ranks, 5
    config.trainer.parallel = ParallelConfig(**parallel)
    config.loss = GSPOLoss() if sequence_loss else config.loss
    if config.trainer.parallel.ep_dispatch == "deepep":
        sys.path.insert(0, STANDINS)
    world = open_world(rank, ranks, store, config)
    policy = build_policy(config, world)
    load_weights(policy, model)
    losses = []
    for step, count in enumerate(SAMPLES, start=1):
        micro_batches = pack(make_samples(step, count=count), world.dp_size, ROW_TOKENS)[world.dp_rank]
        batch = RankBatch(step=step, rank=world.dp_rank, micro_batches=micro_batches, sample_ids=[], journal_offset=0)
        result = forward_backward(policy, batch, config, world, PolicyVersion(0, step - 1), Stopwatch())
        losses.append(result.losses[WHOLE])
    gradients = {name: p.grad.full_tensor().numpy().copy() for name, p in policy.named_parameters()
                 if p.requires_grad}  # fmt: skip
    norm = clip_gradients(list(policy.parameters()), 0.5)
    clipped = clip_gradients(list(policy.parameters()), None)
    return {"losses": losses, "gradients": gradients, "norm": norm, "clipped": clipped,
            "experts": policy.balance_experts(0.0)}  # fmt: skip


class _Share(torch.autograd.Function):
    """A tensor that all ranks have alike and use differently: its gradient is the sum of theirs. With this and
    `sum_over`, what the ranks do together is one function that each of them can check in step with the others."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total


def check_attention(rank: int, ranks: int, store: Path, style: str) -> float:
    """Gradcheck of attention that ranks divide among them; the largest difference from that of one rank."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    torch.manual_seed(0)
    seq_lens, cpu, context = [5, 1, 2, 8], torch.device("cpu"), ContextParallel(dist.group.WORLD, style)
    inputs = [torch.randn(16, heads, 2, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    everything = torch.arange(16)
    part = context.divide(PackedRow(everything, everything, torch.ones(16), everything[1:], seq_lens))

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        mine = (_Share.apply(x)[part.row.token_ids] for x in qkv)
        output = context.open_attention("sdpa", seq_lens, cpu)(*mine, 0.5)
        return sum_over(torch.zeros_like(qkv[0]).index_copy(0, part.row.token_ids, output), dist.group.WORLD)

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)
    return (attend(*inputs) - open_attention("sdpa", seq_lens, cpu)(*inputs, 0.5)).abs().max().item()


def check_journey(rank: int, ranks: int, store: Path) -> list[list[int]]:
    """Gradcheck of rows' way to the ranks of their experts and back; rows of each expert that this rank and, as the
    experts' ranks tell, all ranks have."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    torch.manual_seed(0)
    counts = torch.tensor([[3, 0, 1, 2], [0, 0, 4, 2]])
    rows = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)

    def scale_by_expert(rows: torch.Tensor) -> torch.Tensor:
        journey = Journey.of(counts[rank], dist.group.WORLD)
        factors = (2.0 * rank + torch.arange(2.0) + 1).repeat_interleave(journey.counts)
        back = journey.back(journey.there(_Share.apply(rows)[rank]) * factors[:, None])
        return sum_over(torch.stack([back * (other == rank) for other in range(2)]), dist.group.WORLD)

    assert torch.autograd.gradcheck(scale_by_expert, rows, fast_mode=True)
    expected = torch.stack([rows[i] * (torch.arange(4.0) + 1).repeat_interleave(counts[i])[:, None] for i in range(2)])
    torch.testing.assert_close(scale_by_expert(rows), expected)
    return [counts[rank].tolist(), Journey.of(counts[rank], dist.group.WORLD).counts.tolist()]


def check_fp8_experts(rank: int, ranks: int, store: Path) -> dict[str, list[float]]:
    """By how tokens reach their experts: the errors, as shares of the norm, of what this rank's tokens become, and of
    the gradients of this rank's experts; the second rank has few tokens, and some experts have none."""
    sys.path.insert(0, STANDINS)
    config = RunConfig()
    config.trainer.ranks, config.trainer.parallel = ranks, ParallelConfig(ep=ranks)
    world = open_world(rank, ranks, store, config)
    routing, errors = Routing(experts=6, top_k=2, score="softmax", renormalise=True), {}
    for dispatch in ("all_to_all", "deepep"):
        whole, divided = (MixtureOfExperts(32, 48, routing) for _ in range(2))
        torch.manual_seed(0)
        for parameter, copy in zip(whole.parameters(), divided.parameters(), strict=True):
            parameter.data = torch.randn(parameter.shape).mul_(0.3).bfloat16().float()
            copy.data = parameter.data.bfloat16()
        blocks = torch.nn.ModuleList([divided])
        use_fp8_in_experts(blocks)
        divide_blocks(blocks, world.mesh, dispatch)
        tokens = torch.randn(40, 32).bfloat16()
        (expected, chosen), mine = whole(tokens.float()), [slice(0, 37), slice(37, 40)][rank]
        output, _ = divided(tokens[mine], chosen[mine])
        expected.sum().backward()
        output.float().sum().backward()
        pairs = [(output, expected[mine])]
        for name, parameter in divided.experts.named_parameters():
            wanted = whole.experts.get_parameter(name).grad.chunk(ranks)[rank]
            pairs.append((parameter.grad.to_local(), wanted))
        errors[dispatch] = [((a.float() - b).norm() / b.norm()).item() for a, b in pairs]
    return errors


def fill_at_random(rank: int, ranks: int, store: Path, model: Path, parallel: dict[str, Any]) -> dict[str, Any]:
    """What this rank has of every parameter of a model with random weights, and whether it frees gathered weights."""
    config = RunConfig()
    config.model.path, config.trainer.parallel = str(model), ParallelConfig(**parallel)
    policy = build_policy(config, open_world(rank, ranks, store, config))
    initialise(policy, seed=0)
    parts = {name: local_part(parameter.detach()) for name, parameter in policy.named_parameters()}
    shards = {name: (str(place), local.numpy().copy()) for name, (local, place) in parts.items()}
    policy(PackedRow(torch.arange(4), torch.arange(4), torch.ones(4), torch.arange(1, 4), [4]))
    frees = all(isinstance(parameter, DTensor) for parameter in policy.blocks.parameters())
    return {"shards": shards, "frees": frees}


def write_versions(rank: int, ranks: int, store: Path, model: Path, root: Path) -> list[str]:
    """Write three versions of a model, every weight twice as large as in the one before, the second as a delta only,
    after a first attempt on a full disk. Returns the names of the files that this rank writes of the last one."""
    weights_files.LEAST_FILE_BYTES, names = 2**12, []
    config = RunConfig()
    config.model.path = str(model)
    world = open_world(rank, ranks, store, config)
    policy = build_policy(config, world)
    load_weights(policy, model)

    def write(path: Path, data: memoryview) -> None:
        names.append(path.name)
        path.write_bytes(data)

    def refuse(path: Path, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, "no space left", path)

    with pytest.raises(OSError, match="no space left"):
        weights_files.FileWriter(policy, world, "bfloat16", refuse, remember=False).write(root, whole=True)
    writer = weights_files.FileWriter(policy, world, "bfloat16", write, remember=True)
    for step, whole in enumerate([True, False, True]):
        names.clear()
        weights_files.make_directory(root / f"v0.{step}", world)
        written = writer.write(root / f"v0.{step}", whole=whole)
        if world.first:
            changes = Delta(base=f"0.{step - 1}", files=written.deltas) if step else None
            write_manifest(root / f"v0.{step}", WeightsManifest(version=f"0.{step}", dtype="bfloat16", whole=whole,
                                                                files=written.files, delta=changes))  # fmt: skip
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(2)
    return sorted(names)
