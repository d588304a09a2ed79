"""What an update of weights costs an engine: `python -m tools.bench_weights`.

It starts a real engine with random weights of a known shape, keeps it busy with requests, and publishes versions from a
trainer rank in this process, by each transport in turn.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from prime_hpc.models.tiny import make_char_tokenizer
from tools.weights_rig import Load, Rig, rig

SHAPES = {
    "tiny": dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=32, vocab_size=512),
    "small": dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
                  num_key_value_heads=4, head_dim=64, vocab_size=32000),
    "0.6b": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                 num_key_value_heads=8, head_dim=128, vocab_size=151936),
    "4b": dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
               num_key_value_heads=8, head_dim=128, vocab_size=151936),
    "3b_moe": dict(model_type="qwen3_moe", hidden_size=2048, moe_intermediate_size=512, num_hidden_layers=12,
                   num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936, num_experts=64,
                   num_experts_per_tok=8, norm_topk_prob=True),
}  # fmt: skip
"""Decoders with a tied head, dense ones of Qwen3 unless another type is said."""
PROMPT = [1, 4, 5, 6, 7, 2]
VLLM = {"load_format": "dummy", "enforce_eager": True, "max_num_seqs": 32}
ON_GPU = {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 2**32}
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


def make_model(directory: Path, name: str) -> Path:
    """Configuration and tokenizer of a shape; there are no weights."""
    make_char_tokenizer(directory)
    shape = {"model_type": "qwen3", **SHAPES[name]}
    config = AutoConfig.for_model(**shape, tie_word_embeddings=True, max_position_embeddings=2048, eos_token_id=3)
    config.architectures = [ARCHITECTURES[shape["model_type"]]]
    config.save_pretrained(directory)
    return directory


async def measure(made: Rig, transports: list[str], updates: int) -> list[dict[str, Any]]:
    """A row for each transport: medians over `updates` versions."""
    fleet, rows = made.connect(), []
    print("the engine is ready", time.strftime("%X"), flush=True)
    nbytes = sum(p.numel() for p in made.policy.parameters()) * 2
    token = made.roles["orchestrator-0"].secrets.token
    with Load(fleet, token, PROMPT, clients=8, temperature=1.0, ignore_eos=True, max_tokens=48) as load:
        for transport in transports:
            made.switch(transport=transport)
            await timed_update(made, fleet)  # the first version is whole, the second opens links
            await timed_update(made, fleet)
            times = [await timed_update(made, fleet) for _ in range(updates)]
            row = {key: statistics.median(t[key] for t in times) for key in times[0]}
            rows.append({"transport": transport, "gib": nbytes / 2**30, **row})
            print(json.dumps(rows[-1]), flush=True)
    rows.append({"requests": len(load.finished), "failed": len(load.failed),
                 "spanning": sum(len(stamp["spans"]) > 1 for stamp in load.finished)})  # fmt: skip
    await fleet.close()
    return rows


async def timed_update(made: Rig, fleet: Any) -> dict[str, float]:
    """Seconds from the begin of publishing until the engine serves, and of their parts."""
    version = made.train(share=0.01)
    begin = time.monotonic()
    times = await made.update(fleet, version)
    return {"total_s": time.monotonic() - begin, "prepare_s": times.prepare_s, "load_s": times.load_s,
            "pause_s": times.pause_s, "canary": times.canary or 0.0, "canary_s": times.canary_s}  # fmt: skip


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the engine and measure."""
    gpus = (options.engine_gpus, [0]) if torch.cuda.is_available() else None
    vllm = {**VLLM, **(ON_GPU if gpus else {}), **options.vllm}
    first = "delta" if "delta" in options.transports else "auto"  # an engine keeps a copy of its own for deltas alone
    trainer = {"dtype": "bfloat16" if gpus else "float32", "publish_dtype": "auto"}
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        model = make_model(Path(folder) / "model", options.shape)
        update = {"transport": first, "canary_every": 1, "canary_bound": 1e9, "full_every": 10**6}
        with rig(Path(folder) / "run", model, replicas=1, gpus=gpus, random=True, inference={"vllm": vllm},
                 trainer=trainer, **update) as made:  # fmt: skip
            try:
                return asyncio.run(measure(made, options.transports, options.updates))
            except BaseException:
                print((made.paths.root / "inference-0.log").read_text()[-6000:], flush=True)
                raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--transports", nargs="+", default=["filesystem", "nccl"])
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--engine-gpus", type=int, nargs="+", default=[0], help="the trainer is on the first, 0")
    parser.add_argument("--vllm", type=json.loads, default={}, help="more arguments of vLLM, as a JSON object")
    parser.add_argument("--directory", default=None, help="where versions are written; the system's folder by default")
    parser.add_argument("--out", type=Path, help="file for the rows, as JSON")
    options = parser.parse_args()
    rows = run(options)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
