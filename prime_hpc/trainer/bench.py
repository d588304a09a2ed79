"""The trainer alone, on made-up batches and random weights: throughput, MFU, where a step's time goes, memory."""

import statistics
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from prime_hpc.algorithms.packing import pack
from prime_hpc.cluster.files import write_json
from prime_hpc.cluster.role import Role
from prime_hpc.config.run import RunConfig
from prime_hpc.models.spec import param_count, zero_centred_norms
from prime_hpc.trainer import distributed
from prime_hpc.trainer.compilation import compilations
from prime_hpc.trainer.distributed import World
from prime_hpc.trainer.hf_weights import local_part
from prime_hpc.trainer.loop import forward_backward, open_optimizer
from prime_hpc.trainer.measure import Stopwatch, peak_flops, performance, summarise
from prime_hpc.trainer.memory.report import memory_by_category
from prime_hpc.trainer.model import build_policy
from prime_hpc.trainer.optim import GuardedOptimizer
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.trainer.profiler import StepProfiler
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import PolicyVersion, RankBatch, Sample

VERSION = PolicyVersion(0, 0)
SHORTEST = 16
"""Tokens of the shortest sample of varying lengths."""

Say = Callable[[str], None]


def run(role: Role) -> None:
    """Time `max_steps` steps and write what they gave to `summary.json`."""
    world = distributed.join(role)
    role.rendezvous.publish("ready", step=0)
    result = measure(role.config, world, role.log.info, StepProfiler(role, world))
    if world.first:
        write_json(role.paths.summary, result)
        role.mark_complete()
    role.rendezvous.publish("trained", trained=True, step=role.config.max_steps)
    distributed.leave()


def measure(config: RunConfig, world: World, say: Say, profiler: StepProfiler | None = None) -> dict[str, Any]:
    """Train on made-up batches; `say` gets a line a step.

    Returns:
        Medians over the steps after the warm-up: tokens/s and MFU of whole steps, seconds of their phases; memory of
        this rank in GiB.
    """
    policy = build_policy(config, world)
    initialise(policy, config.seed)
    optimizer = open_optimizer(policy, config, world)
    steps: list[dict[str, float]] = []
    for step in range(1, config.max_steps + 1):
        batch = make_batch(config, policy.config.vocab_size, step, world)
        if step == config.trainer.bench.warmup + 1 and world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(world.device)
        if profiler:
            profiler.begin(step)
        metrics = _step(policy, optimizer, batch, config, world)
        if profiler:
            profiler.end(step)
        say(summarise(step, metrics))
        steps.append(metrics)
    if profiler:
        profiler.close()
    counted = steps[config.trainer.bench.warmup :]
    median = {name: statistics.median(step[name] for step in counted) for name in counted[0]}
    memory = memory_by_category(policy, optimizer.optimizers, world.device)
    return {**_facts(config, policy, world), **_figures(median, world), "memory_gib": memory, **compilations()}


def initialise(policy: nn.Module, seed: int) -> None:
    """Small random matrices, norms that multiply by one, and no biases: a shape without a checkpoint. Each shard has
    numbers of its own, the same wherever a copy of it lies."""
    centred = zero_centred_norms(policy.config.to_dict())
    for name, tensor in policy.state_dict().items():
        local, place = local_part(tensor)
        if tensor.ndim == 1:
            # the norm within a delta rule is a plain one
            adds_one = centred and name.endswith("norm.weight") and ".linear_attn." not in name
            local.fill_(0.0 if adds_one or name.endswith(("bias", "correction")) else 1.0)
            continue
        shard = f"{seed} {name} {[part.start for part in place]}"
        generator = torch.Generator(local.device).manual_seed(zlib.crc32(shard.encode()))
        local.normal_(0.0, 0.02, generator=generator)


def make_batch(config: RunConfig, vocabulary: int, step: int, world: World) -> RankBatch:
    """This rank's rows of a batch of random tokens, all of them sampled."""
    row = config.trainer.micro_batch_tokens or config.seq_len
    rng = np.random.default_rng((config.seed, step))
    lengths = draw_lengths(config, row * config.trainer.bench.rows * world.dp_size, rng)
    samples = [_make_sample(f"{step}.{i}", n, vocabulary, rng) for i, n in enumerate(lengths)]
    rows = pack(samples, world.dp_size, row)[world.dp_rank]
    return RankBatch(step=step, rank=world.rank, micro_batches=rows, journal_offset=0, sample_ids=[])


def draw_lengths(config: RunConfig, tokens: int, rng: np.random.Generator) -> list[int]:
    """Lengths of samples of `tokens` tokens together, the last one cut: all of `seq_len`, or log-normal."""
    spread, longest = config.trainer.bench.spread, config.seq_len
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        drawn = longest if spread == 0 else int(np.clip(rng.lognormal(np.log(longest / 2), spread), SHORTEST, longest))
        lengths.append(min(drawn, left))
    return lengths


def _make_sample(name: str, n: int, vocabulary: int, rng: np.random.Generator) -> Sample:
    return Sample(
        sample_id=name,
        source="bench",
        token_ids=Array.of(rng.integers(0, vocabulary, n), "i4"),
        mask=Array.of(np.ones(n), "bool"),
        logprobs=Array.of(np.full(n, -np.log(vocabulary)), "f4"),
        versions=Array.of(np.full(n, VERSION.pack()), "i8"),
        advantages=Array.of(np.full(n, rng.normal()), "f4"),
    )


def _step(
    policy: PolicyModel, optimizer: GuardedOptimizer, batch: RankBatch, config: RunConfig, world: World
) -> dict[str, float]:
    watch = Stopwatch()
    with watch("forward_backward"):
        result = forward_backward(policy, batch, config, world, VERSION, watch)
    with watch.on(world.device, "optimizer"):
        optimized = optimizer.step(batch.step, result.losses)
    policy.balance_experts(config.trainer.router_bias_rate)
    times = watch.seconds()
    return {**result.metrics(), **optimized, **performance(result, times, world), **times, "flops": result.flops}


def _facts(config: RunConfig, policy: PolicyModel, world: World) -> dict[str, Any]:
    trainer = config.trainer
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    return {
        "model": config.model.shape.get("model_type") or config.model.path,
        "parameters": param_count(policy.config.to_dict()),
        "implementation": policy.impl,
        "attention": policy.kernels,
        "device": device,
        "ranks": world.size,
        "torch": torch.__version__,
        "seq_len": config.seq_len,
        "row_tokens": trainer.micro_batch_tokens or config.seq_len,
        "dtype": trainer.dtype,
        "compile": trainer.compile,
        "fp8": trainer.fp8,
        "fp8_experts": trainer.fp8_experts,
        "activation_checkpointing": trainer.activation_checkpointing,
        "activation_offload": trainer.activation_offload,
        "optimizer_offload": trainer.optimizer_offload,
    }


def _figures(median: dict[str, float], world: World) -> dict[str, Any]:
    seconds = median["time/step"]
    peak = peak_flops(world)
    return {
        "tokens": median["tokens/trained"],
        "tokens_per_s": median["tokens/trained"] / seconds,
        "tflops_per_rank": median["flops"] / seconds / world.size / 1e12,
        "mfu": median["flops"] / (seconds * peak * world.size) if peak else None,
        "seconds": {name.removeprefix("time/"): value for name, value in median.items() if name.startswith("time/")},
    }
