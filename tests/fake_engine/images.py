"""Images in prompts, as an engine of the tiny Qwen3-VL counts them."""

from prime_hpc.inference.protocol import GenerateRequest, ShownPrompt
from prime_hpc.models.tiny_vision import MERGE, PATCH
from prime_hpc.transport.images import decode, from_data_uri

SIDE = PATCH * MERGE
"""Pixels of a side of what one token sees."""


def show(request: GenerateRequest, placeholder: int | None) -> ShownPrompt | None:
    """The prompt with as many placeholders for each image as it takes; None where it has no images.

    Raises:
        ValueError: there are more or fewer images than placeholders.
    """
    if not request.content_parts:
        return None
    if request.token_ids.count(placeholder) != len(request.content_parts):
        raise ValueError(f"{len(request.content_parts)} images, {request.token_ids.count(placeholder)} places for them")
    sizes = iter([decode(from_data_uri(part.url)).size for part in request.content_parts])
    token_ids: list[int] = []
    images: list[tuple[int, int]] = []
    for token in request.token_ids:
        if token != placeholder:
            token_ids.append(token)
            continue
        width, height = next(sizes)
        length = (width // SIDE) * (height // SIDE)
        images.append((len(token_ids), length))
        token_ids += [token] * length
    return ShownPrompt(token_ids=token_ids, images=images)
