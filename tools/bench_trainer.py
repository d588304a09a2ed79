"""The trainer beside what it is compared with, one after the other in one process: `python -m tools.bench_trainer`.

`native` and `hf` are the trainer itself with `model.impl` set so; `plain` is a loop over transformers as one writes it
by hand: float32 parameters under bfloat16 autocast, SDPA, full logits, fused AdamW. All train the same batches.
Arguments of the form KEY=VALUE go to the experiment `bench_trainer`.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from prime_hpc.config.compose import compose_run
from prime_hpc.config.run import RunConfig
from prime_hpc.models.degrees import Degrees
from prime_hpc.models.spec import device_peak_flops, train_flops
from prime_hpc.plan.devices import GIB
from prime_hpc.plan.peak import training_peak
from prime_hpc.trainer.bench import make_batch, measure
from prime_hpc.trainer.distributed import World
from prime_hpc.trainer.parallel.mesh import Mesh
from prime_hpc.transport.messages import MicroBatch

CASES = ("native", "hf", "plain")
PLAIN_TOKENS = 16384
"""Tokens of one forward of the plain loop: more of them would not leave room for their logits."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args()
    results: dict[str, dict[str, Any]] = {}
    with one_rank() as world:
        for case in options.cases:
            results[case] = run_case(case, options.overrides, world)
            print(line(case, results), flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1))


def run_case(case: str, overrides: list[str], world: World) -> dict[str, Any]:
    """One case from a clean device; its first line says what it cost."""
    gc.collect()
    torch.compiler.reset()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    config = compose_run(["+experiment=bench_trainer", *overrides])
    if case == "plain":
        return measure_plain(config, world)
    config.model.impl = case
    result = measure(config, world, lambda text: print(f"{case}: {text}", flush=True))
    return {**result, "planned_gib": planned_gib(config, on_gpu=world.device.type == "cuda")}


def planned_gib(config: RunConfig, *, on_gpu: bool) -> dict[str, float]:
    """What the plan expects of `memory_gib`, the trainer's own report."""
    parts = training_peak(config, config.model.shape, on_gpu=on_gpu, rows=config.trainer.bench.rows)
    held = {"weights": parts.pop("weights"), "optimizer": parts.pop("optimiser")}
    transient = sum(parts.values())
    planned = {**held, "transient": transient, "peak": sum(held.values()) + transient}
    return {name: size / GIB for name, size in planned.items()}


def line(case: str, results: dict[str, dict[str, Any]]) -> str:
    """The figures of a case, and how many times the tokens/s of the plain loop that is, where it is known."""
    result = results[case]
    mfu = f"{result['mfu']:.1%}" if result["mfu"] else "-"
    ratio = result["tokens_per_s"] / results["plain"]["tokens_per_s"] if "plain" in results else float("nan")
    peak, planned = (result.get(kind, {}).get("peak", float("nan")) for kind in ("memory_gib", "planned_gib"))
    return (f"{case:8} {result['tokens_per_s']:10.0f} tokens/s  MFU {mfu}  {peak:6.1f} GiB (plan {planned:.1f})  "
            f"{ratio:5.2f} x plain")  # fmt: skip


@contextmanager
def one_rank() -> Iterator[World]:
    """A world of this process alone, on the GPU where there is one."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World(0, 1, device, Mesh.of(device.type, Degrees()), dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def measure_plain(config: RunConfig, world: World) -> dict[str, Any]:
    """The plain loop: the same keys as the trainer's own figures, where it has them."""
    hf_config, device = AutoConfig.for_model(**config.model.shape), world.device
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, fused=device.type == "cuda")
    seconds, tokens, flops = [], 0, 0.0
    for step in range(1, config.max_steps + 1):
        rows = make_batch(config, hf_config.vocab_size, step, world).micro_batches
        tokens = sum(sum(row.seq_lens) for row in rows)
        flops = sum(train_flops(hf_config.to_dict(), row.seq_lens) for row in rows)
        start = time.perf_counter()
        for row in rows:
            for documents, advantages in split(row, device):
                (plain_loss(model, documents, advantages) / tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[config.trainer.bench.warmup :])
    peak = device_peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    memory = {"peak": torch.cuda.max_memory_allocated(device) / 2**30} if device.type == "cuda" else {}
    return {"tokens": tokens, "tokens_per_s": tokens / median, "mfu": flops / median / peak if peak else None,
            "seconds": {"step": median}, "memory_gib": memory}  # fmt: skip


def split(row: MicroBatch, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Documents int64[d, n] of one length at a time, as many as fit one forward, and their advantages float32[d, n]."""
    tokens, advantages = (torch.tensor(array.numpy(), device=device) for array in (row.token_ids, row.advantages))
    pairs = list(zip(tokens.long().split(row.seq_lens), advantages.split(row.seq_lens), strict=True))
    for length in sorted(set(row.seq_lens)):
        alike = [pair for pair in pairs if len(pair[0]) == length]
        size = max(1, PLAIN_TOKENS // length)
        for i in range(0, len(alike), size):
            documents, weights = zip(*alike[i : i + size], strict=True)
            yield torch.stack(documents), torch.stack(weights)


def plain_loss(model: nn.Module, documents: Tensor, advantages: Tensor) -> Tensor:
    """Sum of the tokens' policy-gradient losses, by full logits."""
    with torch.autocast(documents.device.type, torch.bfloat16):
        logits = model(input_ids=documents, use_cache=False).logits
    logprobs = logits[:, :-1].float().log_softmax(-1).gather(-1, documents[:, 1:, None])[..., 0]
    return -(logprobs * advantages[:, 1:]).sum()


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
