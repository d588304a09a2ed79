"""The images of an episode, each once, and the tokens that stand for them."""

from collections.abc import Iterable
from itertools import groupby

import verifiers.v1 as vf

from prime_hpc.errors import EnvironmentFailure
from prime_hpc.transport.images import digest_of, from_data_uri
from prime_hpc.transport.messages import ImageSpan

IMAGE = 1
"""What renderers mark placeholders of images with; those of videos are 2."""


class ImageNotTrained(EnvironmentFailure):
    """The policy was shown an image whose tokens cannot be told from others."""


class Gallery:
    """The images that traces show. `encoded` holds them by digest."""

    def __init__(self, traces: Iterable[vf.Trace]):
        """
        Raises:
            ImageNotTrained: an image is no data URI.
        """
        self.encoded: dict[str, bytes] = {}
        self._digests: dict[str, str] = {}
        for url in dict.fromkeys(url for trace in traces for node in trace.nodes for url in image_urls(node.message)):
            try:
                data = from_data_uri(url)
            except ValueError as error:
                raise ImageNotTrained(str(error)) from error
            self._digests[url] = digest_of(data)
            self.encoded[self._digests[url]] = data

    def spans(self, branch: vf.Branch) -> list[ImageSpan]:
        """Which tokens of the branch stand for which image, in order.

        Each image has one run of placeholders among the tokens of its message that were not sampled.

        Raises:
            ImageNotTrained: a message has more or fewer of them than images.
        """
        placeholders = {token for token, kind in branch.mm_token_type_id_map.items() if kind == IMAGE}
        spans, start = [], 0
        for node in branch.nodes:
            urls, runs = image_urls(node.message), _runs(node, placeholders)
            if len(urls) != len(runs):
                raise ImageNotTrained(
                    f"a message with {len(urls)} images has {len(runs)} runs of placeholders among its tokens: choose "
                    "a model that sees, and a model.renderer of its family, such as qwen3-vl"
                )
            spans += [ImageSpan(start + begin, length, self._digests[url])
                      for url, (begin, length) in zip(urls, runs, strict=True)]  # fmt: skip
            start += len(node.token_ids)
        return spans


def name_images(messages: list[dict]) -> list[dict]:
    """The messages, as JSON holds them, with digests in the place of the encoded images."""
    return [{**message, "content": [_named(part) for part in message["content"]]}
            if isinstance(message.get("content"), list) else message for message in messages]  # fmt: skip


def _named(part: dict) -> dict:
    try:
        return {**part, "image_url": {"url": digest_of(from_data_uri(part["image_url"]["url"]))}}
    except (KeyError, ValueError):  # text, or an image that lies elsewhere
        return part


def image_urls(message: vf.Message) -> list[str]:
    """The URLs of the images in a message, in order."""
    content = message.content if isinstance(message.content, list) else []
    return [part.image_url.url for part in content if part.type == "image_url"]


def _runs(node: vf.MessageNode, placeholders: set[int]) -> list[tuple[int, int]]:
    """Start and length of each run of placeholders; the policy may sample such a token, which stands for no image."""
    seen = [token if token in placeholders and not sampled else None
            for token, sampled in zip(node.token_ids, node.mask, strict=True)]  # fmt: skip
    runs, start = [], 0
    for token, run in groupby(seen):
        length = len(list(run))
        if token is not None:
            runs.append((start, length))
        start += length
    return runs
