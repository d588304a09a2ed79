"""The texts to reverse, and how near a reply comes."""

import random
import string
from collections.abc import Iterator
from difflib import SequenceMatcher

LETTERS = string.ascii_lowercase
PLAIN = "{text}"


def words(seed: int, min_len: int, max_len: int, alphabet: str = LETTERS, separator: str = "") -> Iterator[str]:
    """An endless stream of random texts, uniform in length and letter; the same seed gives the same stream.

    `separator` stands between the letters: with a space, most tokenizers make each letter a token of its own.
    """
    generator = random.Random(seed)
    while True:
        yield separator.join(generator.choices(alphabet, k=generator.randint(min_len, max_len)))


def rows(count: int, *, seed: int = 0, min_len: int = 8, max_len: int = 12, alphabet: str = LETTERS,
         separator: str = "", prompt: str = PLAIN) -> Iterator[dict]:  # fmt: skip
    """`count` rows of SFT data: `{"messages": [user, assistant]}`, the assistant's message being the answer."""
    for text, _ in zip(words(seed, min_len, max_len, alphabet, separator), range(count), strict=False):
        user = {"role": "user", "content": prompt.replace(PLAIN, text)}
        yield {"messages": [user, {"role": "assistant", "content": text[::-1]}]}


def similarity(reply: str, answer: str) -> float:
    """Ratcliff and Obershelp's ratio: twice the characters in matching blocks over the length of both texts."""
    return SequenceMatcher(None, reply, answer, autojunk=False).ratio()
