"""Scoring code that may hang or crash: it runs in processes of its own, which are killed when their time is over."""

import asyncio
import importlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any

import msgspec

from prime_hpc.errors import EnvironmentFailure

START_S = 120.0
"""Time to import the function."""


class Killed(EnvironmentFailure):
    """A function ran past its limit, raised, or its process died."""


class KillablePool:
    """Processes that call `module.function` with plain data, each for one caller at a time and as many as there are
    cores. They end with the process that holds the pool."""

    def __init__(self, function: str):
        self._function = function
        self._idle: list[Process] = []
        self._places = asyncio.Semaphore(os.cpu_count() or 1)

    async def call(self, arguments: list[Any], seconds: float) -> Any:
        """What the function returns.

        Raises:
            Killed: it was not over after `seconds`, it raised, or its process died.
        """
        async with self._places:
            process = self._idle.pop() if self._idle else await self._start()
            try:
                process.stdin.write(msgspec.json.encode(arguments) + b"\n")
                answer = await self._answer(process, seconds)
            except BaseException:
                if process.returncode is None:
                    process.kill()
                raise
            self._idle.append(process)
        if "error" in answer:
            raise Killed(f"{self._function} raised {answer['error']}")
        return answer["value"]

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", __name__, self._function,
                                                       stdin=PIPE, stdout=PIPE)  # fmt: skip
        await self._answer(process, START_S)
        return process

    async def _answer(self, process: Process, seconds: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(seconds):
                line = await process.stdout.readline()
        except TimeoutError:
            raise Killed(f"{self._function} was not over after {seconds:g} s and was killed") from None
        if not line:
            raise Killed(f"the process of {self._function} died; see this log")
        return msgspec.json.decode(line)


def _serve(path: str) -> None:
    """Answer every line of standard input with one of standard output, the first before any was asked."""
    module, _, name = path.rpartition(".")
    function, out = getattr(importlib.import_module(module), name), sys.stdout.buffer
    sys.stdout = sys.stderr  # what the function prints is no answer
    _say(out, {"value": None})
    for line in sys.stdin.buffer:
        try:
            answer = {"value": function(*msgspec.json.decode(line))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        _say(out, answer)


def _say(out: Any, answer: dict[str, Any]) -> None:
    out.write(msgspec.json.encode(answer) + b"\n")
    out.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])
