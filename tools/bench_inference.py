"""Any server of the OpenAI protocol under the load of `+experiment=bench_inference`: `python -m tools.bench_inference`.

    python -m tools.bench_inference --url http://localhost:8000 --model policy --beside outputs/bench/summary.json

`--beside` takes the figures of another server, and says how many times its tokens/s these are at each concurrency.
"""

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import Any

from prime_hpc.config.inference import InferenceBench
from prime_hpc.orchestrator.bench import measure, table
from prime_hpc.orchestrator.offer import PATHS, Shape, Target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", nargs="+", required=True, help="roots of the servers, without /v1")
    parser.add_argument("--model", required=True, help="name of the model in requests")
    parser.add_argument("--key-variable", help="environment variable that holds the servers' key")
    parser.add_argument("--concurrency", nargs="+", type=int, default=InferenceBench().concurrency)
    parser.add_argument("--rounds", type=int, default=InferenceBench.rounds)
    parser.add_argument("--prompt-tokens", type=int, default=InferenceBench.prompt_tokens)
    parser.add_argument("--shared-tokens", type=int, default=InferenceBench.shared_tokens)
    parser.add_argument("--reply-tokens", type=int, default=InferenceBench.reply_tokens)
    parser.add_argument("--route", choices=list(PATHS), default=InferenceBench.route)
    parser.add_argument("--vocabulary", type=int, default=1000, help="prompts are made of token ids below this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    parser.add_argument("--beside", type=Path, help="JSON file with the figures of another server")
    options = parser.parse_args()
    levels = bench(options)
    print(table(levels), end="")
    if options.out:
        options.out.write_text(json.dumps({"levels": levels}, indent=1))
    if options.beside:
        print("\n".join(ratios(levels, json.loads(options.beside.read_text())["levels"])))


def bench(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of each concurrency."""
    key = os.environ[options.key_variable] if options.key_variable else None
    shape = Shape(options.prompt_tokens, options.reply_tokens, options.vocabulary, options.shared_tokens, options.route)
    settings = InferenceBench(concurrency=options.concurrency, rounds=options.rounds)
    targets = [Target(url.rstrip("/"), options.model, key) for url in options.url]
    return asyncio.run(measure(targets, shape, settings, options.seed, lambda level: None))


def ratios(these: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[str]:
    """A line for each concurrency that both were measured at."""
    by_concurrency = {level["concurrency"]: level["tokens_per_s"] for level in others}
    return [f"{level['concurrency']} at once: {level['tokens_per_s'] / by_concurrency[level['concurrency']]:.3f} x"
            for level in these if level["concurrency"] in by_concurrency]  # fmt: skip


if __name__ == "__main__":
    main()
