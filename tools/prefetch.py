"""Fetch a model where there is a network, for nodes that have none, and see that it is whole.

    python -m tools.prefetch Qwen/Qwen3-0.6B --out /shared/models/Qwen3-0.6B [--revision main]

The folder becomes `model.path`. `python -m prime_hpc.cluster.preflight ... --model FOLDER` sees whether every node has
it.
"""

import argparse
import sys
from pathlib import Path

from huggingface_hub import snapshot_download

from prime_hpc.cluster.checks.cache import inspect_model
from prime_hpc.cluster.striping import spread

WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")


def main(words: list[str] | None = None) -> int:
    """Exit code 0 where the model is whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="its name on the Hugging Face hub")
    parser.add_argument("--out", type=Path, required=True, help="folder on a filesystem that every node sees")
    parser.add_argument("--revision", help="branch, tag or commit")
    found = parser.parse_args(words)
    found.out.mkdir(parents=True, exist_ok=True)
    spread(found.out)
    snapshot_download(found.model, revision=found.revision, local_dir=found.out, allow_patterns=list(WANTED))
    verdict = inspect_model(found.out)
    print(verdict.words)
    return 0 if verdict.fit else 1


if __name__ == "__main__":
    sys.exit(main())
