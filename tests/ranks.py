"""A function as several ranks: processes forked from one that has imported torch already, so that each starts clean."""

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from tests.warm import warm_context

DEADLINE_S = 600.0


def run_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(rank, *arguments)` returns on each rank. The function is found by its name; what it returns is
    plain data or NumPy. The first failure of a rank ends all."""
    context = warm_context()
    ends = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [context.Process(target=_run, args=(theirs, function, rank, *arguments), daemon=True)
                 for rank, (_, theirs) in enumerate(ends)]  # fmt: skip
    for process in processes:
        process.start()
    try:
        return _collect({mine: rank for rank, (mine, _) in enumerate(ends)})
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(waiting: dict[Connection, int]) -> list[Any]:
    results: dict[int, Any] = {}
    while waiting:
        ready = wait(list(waiting), DEADLINE_S)
        if not ready:
            pytest.fail(f"no answer of ranks {sorted(waiting.values())}")
        for pipe in ready:
            rank = waiting.pop(pipe)
            error, results[rank] = pipe.recv()
            if error:
                pytest.fail(f"rank {rank}: {error}")
    return [results[rank] for rank in sorted(results)]


def _run(pipe: Connection, function: Callable[..., Any], rank: int, *arguments: Any) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send((None, function(rank, *arguments)))
    except BaseException:  # handed to the test, whatever it is
        pipe.send((traceback.format_exc(), None))
