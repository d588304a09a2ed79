"""How far the trainer's log-probabilities are from the sampler's: `python -m tools.bench_mismatch --shape 0.6b`.

An engine with random weights samples replies. The trainer, on the same weights, scores the same tokens under every
setting that is asked for. One JSON object: for each setting the mean, the 99th percentile and the largest distance.
"""

import argparse
import asyncio
import json
import tempfile
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from prime_hpc.algorithms.losses import MicroBatchTensors
from prime_hpc.algorithms.packing import pack
from prime_hpc.errors import ConfigurationError
from prime_hpc.trainer.hf_weights import load_weights
from prime_hpc.trainer.model import build_policy
from prime_hpc.trainer.row import PackedRow
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import MicroBatch, PolicyVersion, RoutedExperts, Sample
from tools.bench_weights import ON_GPU, SHAPES, VLLM, make_model
from tools.weights_rig import Rig, rig

SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "compiled": {"dtype": "bfloat16", "compile": True},
    "fp8": {"dtype": "bfloat16", "fp8": True},
    "replay": {"dtype": "bfloat16", "router_replay": True},
}
"""Of `trainer.*`. The experts of the sampler are taken under `replay` only."""
PROMPT_TOKENS = 32
ROW_TOKENS = 4096
VERSION = PolicyVersion(0, 0)


async def serve_policy(made: Rig) -> str:
    """Give the engine the trainer's weights; its address."""
    fleet = made.connect()
    await made.update(fleet, VERSION)
    await fleet.close()
    return fleet.engines[0].base_url


def sample(made: Rig, base_url: str, replies: int, tokens: int) -> list[Sample]:
    """Replies of the engine to random prompts, with the experts of every token where it tells them."""
    headers = {"Authorization": f"Bearer {made.roles['orchestrator-0'].secrets.token}"}
    sampling = {"temperature": 1.0, "ignore_eos": True, "max_tokens": tokens}
    vocabulary = made.policy.config.vocab_size
    prompts = np.random.default_rng(0).integers(4, vocabulary, (replies, PROMPT_TOKENS)).tolist()
    with (
        httpx.Client(base_url=base_url, headers=headers, timeout=300) as client,
        ThreadPoolExecutor(replies) as threads,
    ):

        def ask(number: int) -> Sample:
            body = {"token_ids": prompts[number], "sampling_params": sampling}
            reply = client.post("/inference/v1/generate", json=body, headers={"X-Session-ID": f"m{number}"})
            return to_sample(str(number), prompts[number], reply.raise_for_status().json()["choices"][0])

        return list(threads.map(ask, range(replies)))


def to_sample(name: str, prompt: list[int], choice: dict[str, Any]) -> Sample:
    """What the trainer gets of a reply."""
    reply = choice["token_ids"]
    n, sampled = len(prompt) + len(reply), np.arange(len(prompt) + len(reply)) >= len(prompt)
    logprobs = np.zeros(n, np.float32)
    logprobs[sampled] = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return Sample(
        sample_id=name,
        source="bench",
        token_ids=Array.of([*prompt, *reply], "i4"),
        mask=Array.of(sampled, "bool"),
        logprobs=Array.of(logprobs, "f4"),
        versions=Array.of(np.where(sampled, VERSION.pack(), -1), "i8"),
        advantages=Array.of(np.zeros(n), "f4"),
        routed_experts=routing(choice, n),
    )


def routing(choice: dict[str, Any], n: int) -> RoutedExperts | None:
    """The experts of n tokens; the last one, which nothing was computed from, has no record."""
    record = choice.get("routed_experts")
    if record is None:
        return None
    known = np.frombuffer(b64decode(record["data"]), record["dtype"]).reshape(record["shape"])
    experts = np.full((n, *known.shape[1:]), -1, np.int16)
    experts[record["start"] : record["start"] + len(known)] = known
    return RoutedExperts.of(experts)


@torch.no_grad()
def compare(made: Rig, setting: str, rows: list[MicroBatch]) -> dict[str, Any]:
    """Distances over all sampled tokens under one setting."""
    config, device = made.roles["trainer-0"].config, made.world.device
    try:
        policy = build_policy(replace(config, trainer=replace(config.trainer, **SETTINGS[setting])), made.world)
    except ConfigurationError as error:
        return {"setting": setting, "refused": str(error)}
    load_weights(policy, made.paths.weights_version(str(VERSION)))
    distances = []
    for row in rows:
        tensors = MicroBatchTensors.of(row, device)
        packed = PackedRow.of(row, tensors)
        logprobs, _ = policy(packed if setting == "replay" else replace(packed, replay=None))
        distances.append((logprobs - tensors.logprobs)[tensors.mask].abs().cpu())
    found = torch.cat(distances).numpy()
    return {"setting": setting, "mean": float(found.mean()), "p99": float(np.quantile(found, 0.99)),
            "worst": float(found.max()), "tokens": len(found)}  # fmt: skip


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start the engine, let it sample, and score what it has sampled."""
    on_gpu = torch.cuda.is_available()
    length = PROMPT_TOKENS + options.tokens
    vllm = {**VLLM, **(ON_GPU if on_gpu else {}), "max_model_len": length + 1, **options.vllm}
    trainer = {"dtype": "bfloat16" if on_gpu else "float32", "router_replay": "replay" in options.settings}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", options.shape)
        with rig(Path(folder) / "run", model, replicas=1, gpus=([0], [0]) if on_gpu else None, random=True,
                 inference={"vllm": vllm}, trainer=trainer) as made:  # fmt: skip
            samples = sample(made, asyncio.run(serve_policy(made)), options.replies, options.tokens)
            (rows,) = pack(samples, 1, ROW_TOKENS)
            found = [compare(made, setting, rows) for setting in options.settings]
    return {"shape": options.shape, "vllm": options.vllm, "settings": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["float32", "bfloat16"])
    parser.add_argument("--replies", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="of each reply")
    parser.add_argument("--vllm", type=json.loads, default={}, help="more arguments of vLLM, as a JSON object")
    print(json.dumps(run(parser.parse_args()), indent=1))


if __name__ == "__main__":
    main()
