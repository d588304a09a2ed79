"""What a step measures: sums over micro-batches and ranks, durations, throughput and memory."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from prime_hpc.algorithms.losses import Metrics
from prime_hpc.models import spec
from prime_hpc.trainer.distributed import World, gather
from prime_hpc.trainer.optim import WHOLE
from prime_hpc.transport.messages import MicroBatch


class Stopwatch:
    """Seconds of each named phase of one step; a phase that comes again adds up."""

    def __init__(self):
        self._start = time.perf_counter()
        self._phases: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._add(phase, time.perf_counter() - start)

    @contextmanager
    def on(self, device: torch.device, phase: str) -> Iterator[None]:
        """Seconds that `device` works on what is launched inside, without waiting for it."""
        if device.type != "cuda":
            with self(phase):
                yield
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._events.append((phase, start, end))

    def seconds(self) -> dict[str, float]:
        """`time/<phase>` of all phases, and `time/step` since the watch was made. Waits for phases on a device."""
        for phase, start, end in self._events:
            end.synchronize()
            self._add(phase, start.elapsed_time(end) / 1000)
        self._events.clear()
        times = {f"time/{phase}": seconds for phase, seconds in self._phases.items()}
        return {**times, "time/step": time.perf_counter() - self._start}

    def _add(self, phase: str, seconds: float) -> None:
        self._phases[phase] = self._phases.get(phase, 0.0) + seconds


@dataclass
class BatchTotals:
    """One rank's sums over its micro-batches."""

    losses: dict[str, list[Tensor]] = field(default_factory=dict)
    pairs: dict[str, list[Tensor]] = field(default_factory=dict)
    tokens: int = 0
    replayed: int = 0
    flops: float = 0.0

    def add(self, tenant: str, loss: Tensor, metrics: Metrics) -> None:
        """A tenant's part of a row. Tensors stay on the device until `reduce`, which waits for it once."""
        self.losses.setdefault(tenant, []).append(loss.detach().double())
        for name, pair in metrics.items():
            self.pairs.setdefault(name, []).append(torch.stack(pair))

    def count(self, micro: MicroBatch, hf_config: dict, *, frozen: bool) -> None:
        """The work of a row, under adapters if the model is frozen."""
        self.tokens += sum(micro.seq_lens)
        if micro.routed_experts:
            self.replayed += int((micro.routed_experts.numpy().min(axis=(1, 2)) >= 0).sum())
        self.flops += spec.train_flops(hf_config, micro.seq_lens, frozen=frozen)

    def reduce(self, world: World) -> "BatchResult":
        """The sums over all rows, the same on each rank; ranks that see the same rows have the same sums."""
        stacked = torch.stack([torch.stack(pairs).sum(0) for pairs in self.pairs.values()])
        losses = {tenant: torch.stack(parts).sum().item() for tenant, parts in self.losses.items()}
        mine = {"losses": losses, "tokens": self.tokens, "replayed": self.replayed, "flops": self.flops,
                "pairs": dict(zip(self.pairs, stacked.tolist(), strict=True))}  # fmt: skip
        ranks = gather(mine)[:: world.row_ranks]
        names = sorted({name for rank in ranks for name in rank["pairs"]})
        pairs = {n: [sum(r["pairs"].get(n, (0.0, 0.0))[i] for r in ranks) for i in (0, 1)] for n in names}
        tenants = sorted({tenant for rank in ranks for tenant in rank["losses"]})
        losses = {tenant: sum(rank["losses"].get(tenant, 0.0) for rank in ranks) for tenant in tenants}
        tokens, replayed, flops = (sum(rank[key] for rank in ranks) for key in ("tokens", "replayed", "flops"))
        return BatchResult(losses, tokens, replayed, flops, pairs)


@dataclass(frozen=True)
class BatchResult:
    """A batch as all ranks see it: the loss of each tenant that it trains, real tokens, tokens whose experts were
    replayed, FLOPs of forward and backward, and (sum, count) by name."""

    losses: dict[str, float]
    tokens: int
    replayed: int
    flops: float
    pairs: dict[str, list[float]]

    def metrics(self) -> dict[str, float]:
        """Averages by name; a name without members is left out. The mismatch also says over how many tokens."""
        means = {name: total / count for name, (total, count) in self.pairs.items() if count}
        if "mismatch/abs_mean" in self.pairs:
            means["mismatch/tokens"] = self.pairs["mismatch/abs_mean"][1]
        if self.replayed:
            means["moe/replayed"] = self.replayed / self.tokens
        adapters = {f"adapter/{tenant}/loss": loss for tenant, loss in self.losses.items() if tenant != WHOLE}
        return {"loss": sum(self.losses.values()), "tokens/trained": float(self.tokens), **means, **adapters}


def performance(result: BatchResult, times: dict[str, float], world: World) -> dict[str, float]:
    """Throughput over the whole step, waits included; MFU over forward, backward and optimiser on a known GPU."""
    metrics = {"perf/tokens_per_s": result.tokens / times["time/step"], "perf/peak_memory_gib": _peak_memory(world)}
    peak = peak_flops(world)
    if peak:
        busy = times["time/forward_backward"] + times["time/optimizer"]
        metrics["perf/mfu"] = result.flops / (busy * peak * world.size)
    return metrics


def summarise(step: int, metrics: dict[str, float]) -> str:
    """One line of a log about a step."""
    return (f"step {step} | loss {metrics['loss']:.4f} | gradient norm {metrics['optim/grad_norm']:.3f} | "
            f"lr {metrics['optim/lr']:.2e} | {metrics['perf/tokens_per_s']:.0f} tokens/s | "
            f"{metrics['time/step']:.2f} s | {metrics['perf/peak_memory_gib']:.2f} GiB")  # fmt: skip


def _peak_memory(world: World) -> float:
    """Of this rank, in GiB: the GPU's where there is one, else the process's."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def peak_flops(world: World) -> float | None:
    """Dense bfloat16 FLOP/s of one rank's GPU, where it is known."""
    if world.device.type != "cuda":
        return None
    return spec.device_peak_flops(torch.cuda.get_device_name(world.device))
