"""Sums that a model may propose, and their values."""

import ast
import operator
import random

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
LONGEST, LARGEST = 200, 10**12


def random_sum(generator: random.Random, largest: int, number: int) -> str:
    """`number`, a sign and another number from 1 to `largest`."""
    other = generator.randint(1, largest)
    return f"{number}{generator.choice('+-')}{other}"


def value_of(text: str) -> int | None:
    """The value of a sum of whole numbers with +, - and *; None if it is none, or too large to be asked."""
    if len(text) > LONGEST:
        return None
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        return None
    return value if abs(value) <= LARGEST else None


def _value(node: ast.expr) -> int:
    """Raises ValueError for anything but sums; products stay small, since factors are bounded."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool) and value <= LARGEST:
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
    raise ValueError("not a sum")
