"""Every way to divide a model among the ranks at hand beside one rank, on random weights: the same gradients, and how
fast. One JSON object on rank 0's output: `torchrun --nproc-per-node 2 -m tools.check_parallel`.

On GPUs the ranks compute in bfloat16. An error is the distance of all gradients from those of one rank in float32, as
a share of their norm; that of a layout may be at most `SLACK` times that of one rank. On CPUs, all is in float32.
Names of layouts as arguments leave the others out. `ep deepep` is among them where DeepEP is installed.
"""

import contextlib
import gc
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

from prime_hpc.config.optimizer import AdamW
from prime_hpc.config.run import RunConfig
from prime_hpc.config.trainer import ParallelConfig
from prime_hpc.models.degrees import Degrees, choose_degrees
from prime_hpc.models.spec import device_peak_flops, train_flops
from prime_hpc.trainer.bench import initialise
from prime_hpc.trainer.distributed import World
from prime_hpc.trainer.hf_weights import load_weights, local_part
from prime_hpc.trainer.model import build_policy
from prime_hpc.trainer.optimizers import build_optimizers
from prime_hpc.trainer.parallel.mesh import Mesh
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.trainer.row import PackedRow

SLACK = 1.5
EXACT = 1e-5
"""Error that float32 allows."""
STEPS, WARM_UP = 5, 2
LORA_RANK = 16

SMALL = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "initializer_range": 0.05}  # fmt: skip
LARGE = {"vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 12,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}  # fmt: skip
SPARSE = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
SMALL_SPARSE = {**SPARSE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


@dataclass(frozen=True)
class Layout:
    """A model type and how the ranks divide it; without degrees every rank works alone."""

    name: str
    model_type: str
    degrees: dict[str, Any] | None
    lora_rank: int = 0
    """Of adapters that alone are trained; 0: all weights are."""

    @property
    def model(self) -> tuple[str, int]:
        """What is trained, however it is divided."""
        return self.model_type, self.lora_rank


def layouts(ranks: int, names: list[str]) -> list[Layout]:
    """Those of these names, all when there are none; one rank alone first, for each model."""
    every = [
        Layout("one", "qwen3", None),
        Layout("fsdp", "qwen3", {}),
        Layout("cp ulysses", "qwen3", {"cp": ranks}),
        Layout("cp ring", "qwen3", {"cp": ranks, "cp_style": "ring"}),
        Layout("tp", "qwen3", {"tp": ranks}),
        Layout("one lora", "qwen3", None, LORA_RANK),
        Layout("fsdp lora", "qwen3", {}, LORA_RANK),
        Layout("one sparse", "qwen3_moe", None),
        Layout("fsdp sparse", "qwen3_moe", {}),
        Layout("ep", "qwen3_moe", {"ep": ranks}),
        *([Layout("ep deepep", "qwen3_moe", {"ep": ranks, "ep_dispatch": "deepep"})] if find_spec("deep_ep") else []),
    ]
    if unknown := {*names} - {layout.name for layout in every}:
        sys.exit(f"no layouts: {', '.join(sorted(unknown))}; known are {', '.join(layout.name for layout in every)}")
    chosen = [layout for layout in every if not names or layout.name in names]
    models = {layout.model for layout in chosen}
    return [layout for layout in every if layout in chosen or (layout.degrees is None and layout.model in models)]


def make_config(directory: Path, layout: Layout, dtype: str, ranks: int) -> RunConfig:
    """A run of so many ranks, all on this node unless torchrun says otherwise."""
    config = RunConfig()
    config.trainer.ranks = ranks
    config.cluster.components.trainer.nodes = ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    config.model.path, config.model.impl = str(directory), "native"
    config.trainer.dtype, config.lora.rank = dtype, layout.lora_rank
    config.trainer.parallel = ParallelConfig(**(layout.degrees or {}))
    return config


def open_world(layout: Layout, config: RunConfig, device: torch.device) -> World:
    """All ranks in one mesh, or this rank in one of its own."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if layout.degrees is not None:
        return World(rank, ranks, device, Mesh.of(device.type, choose_degrees(config, ranks)), dist.group.WORLD)
    groups = [dist.new_group([other]) for other in range(ranks)]
    alone = DeviceMesh.from_group(groups[rank], device.type, mesh_dim_names=("fsdp",))
    return World(0, 1, device, Mesh(Degrees(), alone, None, None, None, None), groups[rank])


def make_rows(documents: list[list[int]], config: dict[str, Any], device: torch.device) -> list[PackedRow]:
    """Random rows of documents of these lengths, with all experts chosen beforehand, so that rounding moves none."""
    rows, generator = [], torch.Generator().manual_seed(0)
    experts, chosen = config.get("num_experts", 1), config.get("num_experts_per_tok", 1)
    for lengths in documents:
        n, positions = sum(lengths), torch.cat([torch.arange(length) for length in lengths])
        tokens = torch.randint(config["vocab_size"], (n,), generator=generator)
        scores = torch.rand(config["num_hidden_layers"], n, experts, generator=generator)
        tensors = (tokens, positions, torch.ones(n), positions.nonzero()[:, 0])
        replay = scores.topk(chosen, dim=-1).indices.to(device) if experts > 1 else None
        rows.append(PackedRow(*(tensor.to(device) for tensor in tensors), lengths, replay))
    return rows


def accumulate(policy: PolicyModel, rows: list[PackedRow], world: World) -> torch.Tensor:
    """Gradients of the mean cross-entropy of all rows; the loss of those of this rank."""
    total, tokens = torch.zeros((), device=world.device), sum(len(row.scored) for row in rows)
    for row in rows[world.dp_rank :: world.dp_size]:
        loss = -policy(row)[0][row.scored].sum() / tokens
        loss.backward()
        total += loss.detach()
    return total


def find_gradients(directory: Path, layout: Layout, dtype: str, rows: list[PackedRow], device: torch.device) -> Any:
    """All gradients as one vector in float32."""
    config = make_config(directory, layout, dtype, dist.get_world_size())
    world = open_world(layout, config, device)
    policy = build_policy(config, world)
    load_weights(policy, directory)
    trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    if layout.lora_rank:
        fill(trained)
    accumulate(policy, rows, world)
    return torch.cat([parameter.grad.full_tensor().flatten().float() for parameter in trained.values()])


@torch.no_grad()
def fill(adapters: dict[str, torch.nn.Parameter]) -> None:
    """Values that are the same in every layout; fresh adapters are half zeros and would have half their gradients."""
    for name, parameter in adapters.items():
        local, place = local_part(parameter)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        local.copy_(torch.randn(parameter.shape, generator=generator)[place] / parameter.shape[-1] ** 0.5)


def check(layout: Layout, root: Path, device: torch.device, truths: dict[Any, Any]) -> dict[str, Any]:
    """The error of a layout; `truths` keeps what one rank finds of each model, and its error."""
    ranks, directory = dist.get_world_size(), root / layout.model_type
    shape = SMALL | (SMALL_SPARSE if layout.model_type == "qwen3_moe" else {})
    rows = make_rows([[301, 1, 77, 500]] * ranks, shape, device)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    if layout.degrees is None:
        truths[layout.model] = find_gradients(directory, layout, "float32", rows, device)
    truth = truths[layout.model]
    found = find_gradients(directory, layout, dtype, rows, device)
    error = ((found - truth).norm() / truth.norm()).item()
    if layout.degrees is None:
        truths["error", layout.model] = error
    allowed = max(EXACT, SLACK * truths["error", layout.model])
    return {"layout": layout.name, "error": error, "allowed": allowed, "ok": error <= allowed}


def measure(layout: Layout, root: Path, device: torch.device) -> dict[str, Any]:
    """Speed of optimiser steps over one row for every rank, all ranks together, or what one rank alone does of it."""
    gc.collect()  # the modules of the layout before hang together in cycles, and their weights would count
    ranks, on_gpu = dist.get_world_size(), device.type == "cuda"
    directory = root / f"{layout.model_type} large"
    config = make_config(directory, layout, "bfloat16" if on_gpu else "float32", ranks)
    world = open_world(layout, config, device)
    policy = build_policy(config, world)
    initialise(policy, seed=0)
    rows = make_rows([[4096] * 4 if on_gpu else [32, 32]] * ranks, policy.config.to_dict(), device)
    trained = [(name, parameter) for name, parameter in policy.named_parameters() if parameter.requires_grad]
    [optimizer] = build_optimizers(trained, AdamW())
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    ends = []
    for _ in range(WARM_UP + STEPS):
        accumulate(policy, rows, world)
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
    seconds = (ends[-1] - ends[WARM_UP - 1]) / STEPS
    tokens = sum(len(row.token_ids) for row in rows)
    flops = sum(train_flops(policy.config.to_dict(), row.seq_lens) for row in rows)
    peak = device_peak_flops(torch.cuda.get_device_name()) if on_gpu and not layout.lora_rank else None
    return {"layout": layout.name, "gpus": world.size, "seconds": seconds, "tokens_per_s": tokens / seconds,
            "mfu": flops / (seconds * peak * world.size) if peak else None,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None}  # fmt: skip


def write_models(root: Path, on_gpu: bool) -> None:
    """Small models with weights, and configurations of large ones."""
    for model_type in ("qwen3", "qwen3_moe"):
        sparse = model_type == "qwen3_moe"
        config = AutoConfig.for_model(model_type, **SMALL, **SMALL_SPARSE if sparse else {})
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / model_type)
        large = {**LARGE, **({**SPARSE, "num_hidden_layers": 6} if sparse else {})} if on_gpu else config.to_dict()
        AutoConfig.for_model(**{**large, "model_type": model_type}).save_pretrained(root / f"{model_type} large")


@contextlib.contextmanager
def join() -> Iterator[torch.device]:
    """The process group that torchrun describes."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def main() -> None:
    with join() as device, tempfile.TemporaryDirectory() as own:
        first, shared = dist.get_rank() == 0, [own]
        dist.broadcast_object_list(shared)
        root, truths = Path(shared[0]), dict[Any, Any]()
        if first:
            write_models(root, device.type == "cuda")
        dist.barrier()
        found = layouts(dist.get_world_size(), sys.argv[1:])
        checks = [check(layout, root, device, truths) for layout in found]
        speeds = [measure(layout, root, device) for layout in found]
        baselines = {layout.model: speed["tokens_per_s"] for layout, speed in zip(found, speeds, strict=True)
                     if layout.degrees is None}  # fmt: skip
        for layout, speed in zip(found, speeds, strict=True):
            speed["speedup"] = speed["tokens_per_s"] / baselines[layout.model]
        if first:
            name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
            print(json.dumps({"device": name, "ranks": dist.get_world_size(), "torch": torch.__version__,
                              "gradients": checks, "speed": speeds}, indent=1))  # fmt: skip
        dist.barrier()
        failed = not all(entry["ok"] for entry in checks)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
