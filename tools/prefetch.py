"""Fetch a model where there is a network, for nodes that have none, and see that it is whole.

    python -m tools.prefetch Qwen/Qwen3-0.6B --out /shared/models/Qwen3-0.6B [--revision main]
    python -m tools.prefetch /old/models/Qwen3-0.6B --out /shared/models/Qwen3-0.6B --dataset org/tasks

The folder becomes `model.path`; what exists on this machine is copied. Data sets go to the cache of the hub
(`HF_HOME`), where environments find them without a network: have it on a filesystem that every node sees, and `HF_HOME`
in `cluster.env`. `python -m prime_hpc.cluster.preflight ... --model FOLDER` sees whether every node has the model.
"""

import argparse
import shutil
import sys
from pathlib import Path

from huggingface_hub import snapshot_download

from prime_hpc.cluster.checks.cache import inspect_model
from prime_hpc.cluster.staging import MODEL_FILES
from prime_hpc.cluster.striping import spread


def main(words: list[str] | None = None) -> int:
    """Exit code 0 where the model is whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="its name on the Hugging Face hub, or its folder")
    parser.add_argument("--out", type=Path, required=True, help="folder on a filesystem that every node sees")
    parser.add_argument("--revision", help="branch, tag or commit")
    parser.add_argument("--dataset", dest="datasets", action="append", default=[], help="its name on the hub")
    found = parser.parse_args(words)
    found.out.mkdir(parents=True, exist_ok=True)
    spread(found.out)
    fetch(found.model, found.out, found.revision)
    for dataset in found.datasets:
        print(f"{dataset} is in {snapshot_download(dataset, repo_type='dataset')}")
    verdict = inspect_model(found.out)
    print(verdict.words)
    return 0 if verdict.fit else 1


def fetch(model: str, out: Path, revision: str | None) -> None:
    """Put the files of a model into `out`, from its folder where there is one."""
    if not Path(model).is_dir():
        snapshot_download(model, revision=revision, local_dir=out, allow_patterns=list(MODEL_FILES))
        return
    for pattern in MODEL_FILES:
        for path in Path(model).glob(pattern):
            shutil.copy2(path, out / path.name)


if __name__ == "__main__":
    sys.exit(main())
