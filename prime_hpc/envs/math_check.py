"""Whether an answer is right, for a process of its own: parsing what a model writes may take for ever."""

from math_verify import parse, verify


def is_right(reply: str, answer: str) -> bool:
    """Whether the reply's last answer (in `\\boxed{}` or bare) equals `answer` mathematically."""
    return bool(verify(parse(f"${answer}$", parsing_timeout=None), parse(reply, parsing_timeout=None),
                       timeout_seconds=None))  # fmt: skip
