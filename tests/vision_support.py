"""Images, and samples that show them, over the tokens of the tiny Qwen3-VL."""

import io

import numpy as np
from PIL import Image

from prime_hpc.models.tiny_vision import END, IMAGE, SPECIAL_TOKENS, TURN, VISION, VISION_END
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.images import digest_of
from prime_hpc.transport.messages import ImageSpan, PolicyVersion, Sample

TOKEN = {token: SPECIAL_TOKENS.index(token) for token in (TURN, END, VISION, VISION_END, IMAGE)}
SIDE = 16
"""Pixels of a side of what one token sees."""


def make_png(columns: int, rows: int, seed: int = 0) -> bytes:
    """An image of noise that takes `columns` times `rows` tokens."""
    noise = np.random.default_rng(seed).integers(0, 256, (rows * SIDE, columns * SIDE, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "PNG")
    return out.getvalue()


def make_sample(name: str, *parts: int | tuple[int, bytes], reply: int = 4, step: int = 1) -> tuple[Sample, dict]:
    """A sample whose prompt has so many letters, or so many tokens of an image, and its encoded images.

    Its last `reply` tokens were sampled.
    """
    rng = np.random.default_rng(len(parts) + step)
    tokens, spans, images = [TOKEN[TURN]], [], {}
    for part in parts:
        if isinstance(part, int):
            tokens += rng.integers(13, 39, part).tolist()
            continue
        length, data = part
        spans.append(ImageSpan(len(tokens) + 1, length, digest_of(data)))
        images[digest_of(data)] = data
        tokens += [TOKEN[VISION], *[TOKEN[IMAGE]] * length, TOKEN[VISION_END]]
    tokens += [TOKEN[END], TOKEN[TURN], *rng.integers(13, 39, reply).tolist()]
    n = len(tokens)
    mask = np.arange(n) >= n - reply
    sample = Sample(
        sample_id=name,
        source="squares",
        token_ids=Array.of(tokens, "i4"),
        mask=Array.of(mask, "bool"),
        logprobs=Array.of(np.where(mask, -4.0, 0.0), "f4"),
        versions=Array.of(np.where(mask, PolicyVersion(0, step - 1).pack(), -1), "i8"),
        advantages=Array.of(np.full(n, rng.normal()), "f4"),
        images=spans,
    )
    return sample, images
