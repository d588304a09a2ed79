"""Repositories of a module, its tests and one mistake in the module, made from a few programs and a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
ADJECTIVES = ("brisk", "calm", "dusty", "eager", "faint", "green", "husky", "inner", "jolly", "keen")


@dataclass(frozen=True)
class Program:
    """A right module. Of its constant, `(text, range)`, the number is drawn; `mistakes` are `(right, wrong)` texts."""

    name: str
    constant: tuple[str, range]
    mistakes: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Repository:
    """Two files: a module with a mistake, and its tests, of which at least one fails."""

    module_path: str
    module: str
    right: str
    """The module without the mistake."""
    test_path: str
    tests: str

    @property
    def num_tests(self) -> int:
        return self.tests.count("def test_")


KNOWN = (
    Program(
        "intervals",
        ("APART = 1", range(1, 8)),
        [("<= merged", "< merged"), ("max(merged[-1][1], end)", "end"), ("sorted(intervals)", "intervals")],
    ),
    Program(
        "cache",
        ("ROOM = 3", range(2, 10)),
        [
            ("        self.entries.move_to_end(key)\n        return", "        return"),
            ("> ROOM:", ">= ROOM:"),
            ("popitem(last=False)", "popitem()"),
        ],
    ),
    Program(
        "numerals",
        ("MOST = 3999", range(2000, 3999)),
        [('("IX", 9), ', ""), ("number >= value", "number > value"), ("<= MOST", "< MOST")],
    ),
    Program(
        "windows",
        ("LENGTH = 4", range(3, 10)),
        [
            ("[-LENGTH:]", "[:LENGTH]"),
            ("sorted(self.values)", "self.values"),
            ("(ordered[middle - 1] + ordered[middle]) / 2", "ordered[middle]"),
        ],
    ),
    Program(
        "fields",
        ("", range(1)),
        [
            (" and not quoted", ""),
            ("return [*fields, field]", "return fields"),
            ("quoted = not quoted", "quoted = True"),
        ],
    ),
)


def repository(index: int, seed: int) -> Repository:
    """Repository number `index`: programs take turns; the mistake, the module's name and its constant are drawn."""
    program, generator = KNOWN[index % len(KNOWN)], random.Random(f"{seed}/{index}")
    name = f"{generator.choice(ADJECTIVES)}_{program.name}"
    constant, numbers = program.constant
    drawn = f"{constant.partition('=')[0]}= {generator.choice(numbers)}" if constant else ""
    right = (PROGRAMS / f"{program.name}.py").read_text().replace(constant, drawn, 1)
    tests = (PROGRAMS / f"test_{program.name}.py").read_text().replace(f"from {program.name} ", f"from {name} ")
    return Repository(f"{name}.py", right.replace(*generator.choice(program.mistakes), 1), right,
                      f"test_{name}.py", tests)  # fmt: skip
