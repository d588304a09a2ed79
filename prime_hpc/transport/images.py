"""Encoded images on their way: from the data URI of a message to pixels, which engine and trainer must see alike."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prime_hpc.errors import CorruptData
from prime_hpc.transport.messages import MicroBatch

if TYPE_CHECKING:
    from PIL.Image import Image

PREFIX, MARK = "data:image/", ";base64,"
WHITE = (255, 255, 255)
"""What is seen through a transparent image."""


def digest_of(data: bytes) -> str:
    """The name of an encoded image, 32 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def to_data_uri(png: bytes) -> str:
    """The URL of a PNG in a message."""
    return f"{PREFIX}png{MARK}{base64.b64encode(png).decode()}"


def from_data_uri(url: str) -> bytes:
    """The encoded image in the URL of a message.

    Raises:
        ValueError: it is no data URI of an image; what lies elsewhere may be another image by the time it trains.
    """
    head, mark, payload = url.partition(MARK)
    if not head.startswith(PREFIX) or not mark:
        raise ValueError(f"{url[:60]!r} is no image: send it as {PREFIX}png{MARK}...")
    try:
        return base64.b64decode(payload, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the data URI of an image holds no base64 ({error})") from error


def decode(data: bytes) -> Image:
    """The image as 8-bit RGB; a transparent one is seen on white.

    Raises:
        CorruptData: it cannot be decoded.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data))
        if not image.has_transparency_data:
            return image.convert("RGB")
        layer = image.convert("RGBA")
    except (UnidentifiedImageError, OSError) as error:
        raise CorruptData(f"the image {digest_of(data)} of {len(data)} bytes cannot be decoded: {error}") from error
    seen = Image.new("RGB", layer.size, WHITE)
    seen.paste(layer, mask=layer)
    return seen


def images_of(micro_batches: Iterable[MicroBatch], known: Mapping[str, bytes]) -> dict[str, bytes]:
    """The images that these rows show, each once.

    Raises:
        CorruptData: one is not among those `known`.
    """
    shown = dict.fromkeys(image.digest for micro in micro_batches for image in micro.images)
    if missing := [digest for digest in shown if digest not in known]:
        raise CorruptData(f"the rollouts of this batch lack {len(missing)} of the images that their samples show")
    return {digest: known[digest] for digest in shown}
