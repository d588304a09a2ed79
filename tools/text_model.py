"""Take the text model out of a checkpoint of Qwen3.5 (`qwen3_5`, `qwen3_5_moe`), which has a vision tower beside it.

    python -m tools.text_model /models/Qwen3.5-9B --out /models/Qwen3.5-9B-text

The folder becomes `model.path`, for trainer and engines alike. Values stay as they are; only names change, and experts
that lie in one tensor get one each. Files are rewritten one by one, so that memory for the largest is enough.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from prime_hpc.cluster.staging import MODEL_FILES
from prime_hpc.config.json_files import read_json
from prime_hpc.config.model_files import INDEX, missing_weights, weight_files

ARCHITECTURES = {"qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}
NESTED, PLAIN = "model.language_model.", "model."
OTHERS = ("model.visual.", "mtp.")
"""What the text model does without: the tower, and layers for speculative decoding."""
LEFT_OUT = ("config.json", INDEX, "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def main(words: list[str] | None = None) -> int:
    """Exit code 0 where a text model was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    found = parser.parse_args(words)
    config = read_json(found.model / "config.json") or {}
    text = config.get("text_config") or config
    if text.get("model_type") not in ARCHITECTURES:
        parser.error(f"{found.model} is no checkpoint of Qwen3.5: its model_type is {config.get('model_type')}")
    if missing := missing_weights(found.model):
        parser.error(f"{found.model} lacks {missing}")
    if found.out.exists():
        parser.error(f"{found.out} exists")
    found.out.mkdir(parents=True)
    _write_config(found.out, config, text)
    sizes = [_convert(found.model / name, found.out / name) for name in weight_files(found.model)]
    if len(sizes) > 1:
        names = {tensor: file for size in sizes for tensor, file in size.items()}
        (found.out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}, indent=2))
    _copy_others(found.model, found.out)
    print(f"{found.out} holds {sum(map(len, sizes))} tensors of {text['model_type']}")
    return 0


def _write_config(out: Path, config: dict, text: dict) -> None:
    """That of the text model; what it shares with the whole is said there."""
    shared = {key: config[key] for key in ("tie_word_embeddings", "dtype", "torch_dtype") if key in config}
    written = {**text, **shared, "architectures": [ARCHITECTURES[text["model_type"]]]}
    (out / "config.json").write_text(json.dumps(written, indent=2))


def _convert(source: Path, target: Path) -> dict[str, str]:
    """The file of each tensor that was written; a file with none of the text model is left out."""
    with safe_open(source, "pt") as file:
        tensors = {new: tensor for name in file.keys() if not name.startswith(OTHERS)
                   for new, tensor in rename(name, file.get_tensor(name))}  # fmt: skip
    if tensors:
        save_file(tensors, target, metadata={"format": "pt"})
    return dict.fromkeys(tensors, target.name)


def rename(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a text model that a tensor becomes. Stacked experts have a matrix of gate above up, then down."""
    if name.startswith(NESTED):
        name = PLAIN + name.removeprefix(NESTED)
    stem, _, matrix = name.rpartition(".")
    if not stem.endswith(".experts"):
        yield name, tensor
        return
    parts = {"gate_proj": 0, "up_proj": 1} if matrix == "gate_up_proj" else {matrix: 0}
    for expert, whole in enumerate(tensor):
        for part, place in parts.items():
            yield f"{stem}.{expert}.{part}.weight", whole.chunk(len(parts))[place].clone()


def _copy_others(model: Path, out: Path) -> None:
    for path in {path for pattern in MODEL_FILES for path in model.glob(pattern)}:
        if path.name not in LEFT_OUT and path.suffix != ".safetensors":
            shutil.copy2(path, out / path.name)


if __name__ == "__main__":
    sys.exit(main())
