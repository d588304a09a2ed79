"""Processes forked from one that has imported the heavy libraries already, so that each starts clean and at once."""

import multiprocessing
from multiprocessing.context import ForkServerContext


def warm_context() -> ForkServerContext:
    """Its `Process` is such a process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.preloaded", "tests.parallel_support", "tests.trainer_support"])
    return context
