"""Processes that wait for work, so that many cases over several ranks import torch once."""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

DEADLINE_S = 240.0


class RankPool:
    """`size` processes; a piece of work takes the first few of them as its ranks. Work that fails takes them all down,
    since the others may wait for the rank that failed; new ones take their place."""

    def __init__(self, size: int):
        self._size = size
        self._start()

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(rank, *arguments)` returns on each rank. The function is found by its name; what it returns
        is plain data or NumPy."""
        for rank, pipe in enumerate(self._pipes[:ranks]):
            pipe.send((function, rank, *arguments))
        results: dict[int, Any] = {}
        while len(results) < ranks:
            waiting = {self._pipes[rank]: rank for rank in range(ranks) if rank not in results}
            ready = wait(waiting, DEADLINE_S)
            outcomes = {waiting[pipe]: pipe.recv() for pipe in ready}
            errors = [f"rank {rank}: {error}" for rank, (error, _) in outcomes.items() if error]
            if errors or not ready:
                self.close()
                self._start()
                pytest.fail("\n".join(errors) or f"no answer of ranks {sorted(waiting.values())}")
            results |= {rank: result for rank, (_, result) in outcomes.items()}
        return [results[rank] for rank in range(ranks)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ends = [context.Pipe() for _ in range(self._size)]
        self._pipes = [mine for mine, _ in ends]
        self._processes = [context.Process(target=_serve, args=(theirs,), daemon=True) for _, theirs in ends]
        for process in self._processes:
            process.start()


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        function, rank, *arguments = pipe.recv()
        try:
            pipe.send((None, function(rank, *arguments)))
        except BaseException:  # handed to the test, whatever it is
            pipe.send((traceback.format_exc(), None))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
