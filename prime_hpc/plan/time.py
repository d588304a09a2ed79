"""Seconds of a step and what they cost: a roofline of trainer and engines, with every assumption named.

Training, decoding and filesystem are those of single runs on one H200 (docs/benchmarks.md), the shares of bandwidth and
of prefill are assumed. Slow filesystems and environments make a run slower than its estimate.
"""

from dataclasses import dataclass
from math import ceil

from prime_hpc.config.run import RunConfig
from prime_hpc.config.sizes import trainer_ranks
from prime_hpc.models import spec
from prime_hpc.models.spec import HFConfig
from prime_hpc.plan.devices import Device
from prime_hpc.plan.memory import cached_sequences, engine_memory, engine_weights
from prime_hpc.plan.peak import kept_activations
from prime_hpc.plan.workload import Workload, micro_batches, sequences

PRODUCTS = 0.76
"""Of a GPU's peak that products of matrices and attention reach: 750 of 989 TFLOP/s."""
PASSES, PASSES_COMPILED = 13, 7.6
"""How often a step moves, between a GPU's memory and its cores, the bytes that a backward pass needs of the forward."""
ROW_BYTES, STEP_BYTES = 55, 64
"""Moved for each parameter by a row, which gathers weights and reduces gradients, and by clipping and AdamW."""
LAUNCH_S = 0.0047
"""Of a block's forward and backward pass where it is not compiled, however little there is to compute."""
RECOMPUTE = 1 / 3
"""What activation checkpointing of every block adds: one forward pass beside the three of forward and backward."""
BANDWIDTH_SHARE = 0.6
"""Of a GPU's memory bandwidth that decoding reaches."""
DECODE_S = 0.017
"""Of one decoding step of an engine, whatever its size: scheduling, sampling, launches."""
PREFILL_MFU = 0.4
WRITE_BYTES_S = 0.46e9
"""Gathering, writing and hashing weights, by the nodes of the trainer together for each of them."""
READ_BYTES_S = 1.1e9
"""An engine that loads weights from the filesystem."""
START_S = 100.0


@dataclass(frozen=True)
class Pace:
    """Seconds of a step by what takes them, tokens a step, and the GPUs that are held meanwhile."""

    trained_tokens: float
    sampled_tokens: float
    train_s: float
    publish_s: float
    sample_s: float
    load_s: float
    overlapped: bool
    gpus: int
    steps: int

    @property
    def step_s(self) -> float:
        """The slower side where sampling goes on during training, else one after the other."""
        trainer, engines = self.train_s + self.publish_s, self.sample_s + self.load_s
        return max(trainer, engines) if self.overlapped else trainer + engines

    @property
    def trained_per_s(self) -> float:
        return self.trained_tokens / self.step_s

    @property
    def sampled_per_s(self) -> float:
        return self.sampled_tokens / self.step_s

    @property
    def hours(self) -> float:
        return (self.steps * self.step_s + START_S) / 3600

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.gpus


def estimate_pace(config: RunConfig, hf_config: HFConfig, workload: Workload, *, trainer: Device, engine: Device | None,
                  engine_gpus: int, trainer_nodes: int, gpus: int) -> Pace:  # fmt: skip
    """The pace of a run: each trainer rank has a `trainer` GPU, each engine has `engine_gpus` of the kind `engine`."""
    rollouts = sequences(config)
    serves = config.mode == "rl" and engine is not None
    parameters = spec.param_count(hf_config)
    return Pace(
        trained_tokens=rollouts * workload.tokens,
        sampled_tokens=rollouts * workload.completion if serves else 0.0,
        train_s=train_seconds(config, hf_config, rollouts, workload, trainer),
        publish_s=2 * parameters / (WRITE_BYTES_S * trainer_nodes) if serves else 0.0,
        sample_s=sample_seconds(config, hf_config, workload, engine, engine_gpus) if serves and engine else 0.0,
        load_s=2 * parameters / READ_BYTES_S if serves else 0.0,
        overlapped=config.orchestrator.max_staleness > 0,
        gpus=gpus,
        steps=config.max_steps,
    )


def train_seconds(config: RunConfig, hf_config: HFConfig, rollouts: int, workload: Workload, device: Device) -> float:
    """Forward, backward and optimiser of a batch, on all ranks: what products take, and what passes through memory."""
    trainer, ranks, parameters = config.trainer, trainer_ranks(config), spec.param_count(hf_config)
    mode, anew = trainer.activation_checkpointing, RECOMPUTE / trainer.activation_checkpointing_every
    again = 1 + anew * (mode == "full")
    flops = spec.train_flops(hf_config, [ceil(workload.tokens)], frozen=config.lora.on) * rollouts * again / ranks
    tokens, rows = rollouts * workload.tokens / ranks, micro_batches(config, rollouts, workload)
    needed, _ = kept_activations(config, hf_config, ceil(workload.tokens), on_gpu=True)
    passes = (PASSES_COMPILED if trainer.compile else PASSES) * (1 + anew * (mode != "none"))
    moved = passes * tokens * sum(needed) + parameters * (ROW_BYTES * rows + STEP_BYTES / ranks)
    computing = flops / (device.flops * PRODUCTS) + moved / (device.bandwidth * BANDWIDTH_SHARE)
    return max(computing, 0.0 if trainer.compile else LAUNCH_S * len(needed) * rows)


def sample_seconds(config: RunConfig, hf_config: HFConfig, workload: Workload, device: Device, gpus: int) -> float:
    """Sampling a batch, when as many rollouts run as may and fit into the KV cache.

    A decoding step reads the weights and the cache of every running rollout once (Pope et al. 2022, arXiv 2211.05102);
    prompts cost the FLOPs of a forward.
    """
    replicas, rollouts = config.inference.replicas, config.orchestrator.batch_size
    cache = engine_memory(config, hf_config, gpus=gpus, device=device).gpu["KV cache"]
    fits = max(1, cached_sequences(config, hf_config, cache, gpus, workload.tokens))
    running = min(ceil(config.orchestrator.inflight / replicas), fits)
    bytes_read = engine_weights(config, hf_config, gpus) * gpus
    bytes_read += running * (workload.prompt + workload.completion / 2) * spec.kv_bytes_per_token(hf_config, 2)
    decode_s = DECODE_S + bytes_read / (device.bandwidth * BANDWIDTH_SHARE * gpus)
    prefill = spec.train_flops(hf_config, [ceil(workload.prompt)]) / 3 * rollouts / replicas
    waves = rollouts / replicas / running
    return waves * workload.completion * decode_s + prefill / (device.flops * PREFILL_MFU * gpus)


def assumptions(config: RunConfig, workload: Workload) -> list[str]:
    """What the estimate takes for granted, in sentences."""
    lengths = f"{workload.prompt:.0f} prompt and {workload.completion:.0f} sampled tokens a rollout"
    said = [f"{lengths} ({workload.source})", f"the trainer's products reach {PRODUCTS:.0%} of the peak"]
    if config.mode == "rl":
        said += [
            f"sampling and training {'overlap' if config.orchestrator.max_staleness else 'take turns'}",
            "environments take no time of their own",
            f"engines reach {BANDWIDTH_SHARE:.0%} of the memory bandwidth and {DECODE_S * 1000:.0f} ms a token at best",
            f"weights are written at {WRITE_BYTES_S / 1e9:.2f} GB/s a trainer node and read at "
            f"{READ_BYTES_S / 1e9:.1f} GB/s an engine",
        ]
    return said
