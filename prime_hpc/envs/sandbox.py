"""Commands in the runtime of an episode, each with a hard limit of time and memory."""

import shutil
import sys
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf

from prime_hpc.config.env import RuntimeConfig
from prime_hpc.envs import confine as confine_program
from prime_hpc.errors import EnvironmentFailure

IN_CONTAINER = 'ulimit -v "$1"; shift; exec timeout -s KILL "$@" 2>&1'
"""The shell of any image does this. What escapes from `timeout` ends with its container."""


@dataclass(frozen=True)
class Limits:
    """Of one command: seconds until it is killed, and MiB of memory (in a container of each of its processes)."""

    seconds: float
    memory_mib: int

    def command(self, runtime: vf.Runtime, command: list[str]) -> list[str]:
        """`command` under these limits."""
        if isinstance(runtime.config, vf.SubprocessConfig):
            confine = [sys.executable, "-I", confine_program.__file__]  # isolated from modules of the episode's folder
            return [*confine, f"{self.seconds:g}", str(self.memory_mib), *command]
        return ["sh", "-c", IN_CONTAINER, "sh", str(self.memory_mib * 1024), f"{self.seconds:g}", *command]


async def run(runtime: vf.Runtime, command: list[str], limits: Limits) -> vf.ProgramResult:
    """Run `command` in the working directory of `runtime`; errors are in the same stream as the rest of the output."""
    return await runtime.run(limits.command(runtime, command), {})


def verifiers_runtime(config: RuntimeConfig) -> dict[str, Any]:
    """The runtime as a seat of a verifiers environment names it.

    Raises:
        EnvironmentFailure: its program is not installed on this node.
    """
    if config.name != "subprocess" and shutil.which(config.name) is None:
        raise EnvironmentFailure(f"there is no program {config.name!r} on this node; load its module in cluster.setup, "
                                 "or set runtime.name=subprocess, which isolates nothing")  # fmt: skip
    image = {} if config.image is None else {"image": config.image}
    return {"type": config.name, **image, **config.options}
