"""SmolLM2-135M-Instruct in Hugging Face layout from its GGUF file, and examples of reversing for its SFT warm-up.

    python -m tools.prepare_smollm2 SmolLM2-135M-Instruct.Q4_1.gguf --out models/smollm2

Needs the extra `gguf`. The weights were quantised to 4 bits; what is written is their dequantised value.
"""

import argparse
import copy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tools.make_reverse_text import task_arguments, write_examples

EXPERIMENT = "reverse_text"
NOT_OF_THE_PLAIN_MODEL = ("quantization_config", "dtype")


def convert(gguf: Path, out: Path, dtype: torch.dtype) -> None:
    """Write config, weights of `dtype`, tokenizer and generation config of the model in `gguf` to `out`."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(loaded.config.eos_token_id)
    tokenizer.save_pretrained(out)
    _without_quantisation(loaded).to(dtype).save_pretrained(out)


def _without_quantisation(loaded: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same weights in a model that never was quantised: transformers refuses to save the loaded one."""
    values = {k: v for k, v in loaded.config.to_dict().items() if k not in NOT_OF_THE_PLAIN_MODEL}
    plain = LlamaForCausalLM(LlamaConfig(**values))
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = copy.deepcopy(loaded.generation_config)
    return plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("gguf", type=Path, help="the GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model and of sft.jsonl")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the weights")
    parser.add_argument("--rows", type=int, default=20_000, help="examples in sft.jsonl")
    parser.add_argument("--seed", type=int, default=0, help="seed of the examples")
    args = parser.parse_args()
    convert(args.gguf, args.out, getattr(torch, args.dtype))
    write_examples(args.out / "sft.jsonl", args.rows, args.seed, task_arguments(EXPERIMENT))


if __name__ == "__main__":
    main()
