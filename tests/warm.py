"""Processes forked from one that has imported the heavy libraries already, so that each starts clean and at once."""

import multiprocessing
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tools.forked import Forked, become


def warm_context() -> ForkServerContext:
    """Its `Process` is such a process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.preloaded", "tests.parallel_support", "tests.trainer_support"])
    return context


def start_warm(command: list[str], env: dict[str, str], log: Path) -> Forked:
    """Start `python -m MODULE ARGUMENTS` as such a process, whose output is added to `log`."""
    process = warm_context().Process(target=become, args=(command, env, log))
    process.start()
    return Forked(process)
