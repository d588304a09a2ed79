"""Rows of coloured squares, how they look, and how near a reply comes."""

import io
import random
from collections.abc import Iterator, Sequence

from PIL import Image, ImageDraw

COLOURS = {"red": "#ff0000", "green": "#00ff00", "blue": "#0000ff", "yellow": "#ffff00", "black": "#000000",
           "white": "#ffffff"}  # fmt: skip


def rows_of(seed: int, names: Sequence[str], min_len: int, max_len: int) -> Iterator[list[str]]:
    """An endless stream of rows, uniform in length and colour; the same seed gives the same stream."""
    generator = random.Random(seed)
    while True:
        yield generator.choices(names, k=generator.randint(min_len, max_len))


def draw(colours: Sequence[str], side: int) -> bytes:
    """A PNG of squares of `side` pixels, from left to right; colours as Pillow knows them."""
    image = Image.new("RGB", (side * len(colours), side))
    pen = ImageDraw.Draw(image)
    for i, colour in enumerate(colours):
        pen.rectangle((i * side, 0, (i + 1) * side - 1, side - 1), fill=colour)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def share_in_place(reply: Sequence[str], answer: Sequence[str]) -> float:
    """How many names stand where they belong, over the length of the longer row."""
    right = sum(said == true for said, true in zip(reply, answer, strict=False))
    return right / max(len(reply), len(answer))
