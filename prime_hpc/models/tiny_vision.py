"""A vision-language model small enough to post-train on a laptop: a character tokenizer and a tiny Qwen3-VL.

It speaks the chat format of the real ones, so that the renderer `qwen3-vl` serves both. Torch and transformers are
imported where they are used, as in `tiny`.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import TYPE_CHECKING

from prime_hpc.models.tiny import VOCAB_MULTIPLE, write_char_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

PAD, TURN, END, VISION, VISION_END, IMAGE, VIDEO = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
SPECIAL_TOKENS = (
    PAD, TURN, END, VISION, VISION_END, IMAGE, VIDEO, "<tool_call>", "</tool_call>", "<tool_response>",
    "</tool_response>", "<think>", "</think>",
)  # fmt: skip
"""Ids from 0 on, in this order; the characters of the alphabet follow."""
LETTERS = string.ascii_lowercase + " \n"
MAX_POSITIONS = 512
"""Longest sequence of the tiny model, in tokens."""
PATCH, MERGE = 8, 2
"""Pixels of a side of a patch, and patches of a side of what one token sees: 16 x 16 pixels."""
MAX_TOKENS = 64
"""An image that would take more tokens is made smaller."""
HEADS = 4

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_vision_model(
    path: Path, seed: int, alphabet: str = LETTERS, hidden_size: int = 64, layers: int = 2
) -> Qwen3VLForConditionalGeneration:
    """Write a randomly initialised Qwen3-VL in float32, its tokenizer and processor to `path` and return it.

    The same seed gives the same weights.
    """
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    tokenizer = make_vision_tokenizer(path, alphabet)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(_config(tokenizer, hidden_size, layers))
    model.save_pretrained(path)
    _write_image_processor(path)
    return model


def make_vision_tokenizer(path: Path, alphabet: str = LETTERS) -> PreTrainedTokenizerFast:
    """Write a tokenizer of one token a character, with the special tokens of Qwen3-VL, to `path` and return it.

    A character outside `alphabet` becomes `<|endoftext|>`.
    """
    return write_char_tokenizer(path, SPECIAL_TOKENS, alphabet, pad=PAD, eos=END, template=CHAT_TEMPLATE,
                                max_length=MAX_POSITIONS)  # fmt: skip


def _write_image_processor(path: Path) -> None:
    """What turns pixels into patches, as engine and trainer both load it. It needs no library for videos."""
    token = (PATCH * MERGE) ** 2
    sizes = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2, "image_mean": [0.5] * 3,
             "image_std": [0.5] * 3, "size": {"shortest_edge": token, "longest_edge": MAX_TOKENS * token}}  # fmt: skip
    described = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor", **sizes}
    (path / "preprocessor_config.json").write_text(json.dumps(described, indent=2))


def _config(tokenizer: PreTrainedTokenizerFast, hidden_size: int, layers: int) -> Qwen3VLConfig:
    """Shape of the model; its rotary frequencies are divided among time, height and width as 2 : 1 : 1."""
    from transformers import Qwen3VLConfig

    head_dim = hidden_size // HEADS * 2
    text = {
        "vocab_size": -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "head_dim": head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "eos_token_id": SPECIAL_TOKENS.index(END),
        "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True,
                            "mrope_section": [head_dim // 4, head_dim // 8, head_dim // 8]},
    }  # fmt: skip
    vision = {
        "depth": 2,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_heads": HEADS,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden_size,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=SPECIAL_TOKENS.index(IMAGE),
        video_token_id=SPECIAL_TOKENS.index(VIDEO),
        vision_start_token_id=SPECIAL_TOKENS.index(VISION),
        vision_end_token_id=SPECIAL_TOKENS.index(VISION_END),
        tie_word_embeddings=False,
    )
