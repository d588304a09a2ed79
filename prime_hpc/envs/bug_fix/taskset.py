"""The verifiers taskset and harness of `bug_fix`."""

import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence

import verifiers.v1 as vf
from pydantic import Field

from prime_hpc.envs.bug_fix.repositories import Repository, repository
from prime_hpc.envs.sandbox import Limits, run
from prime_hpc.envs.tools import ToolHarness

READ_BYTES = 100_000
CHECK = """
import sys, unittest
sys.path.append(".")
result = unittest.TextTestRunner(stream=sys.stderr).run(unittest.defaultTestLoader.loadTestsFromName(sys.argv[1]))
print(sys.argv[2], result.testsRun, result.wasSuccessful())
"""
"""Runs the tests and prints a word that the module cannot know, so that a module that ends the process fails."""


class BugFixConfig(vf.TasksetConfig):
    """Arguments of the environment."""

    num_tasks: int = Field(1000, ge=1)
    """Number of tasks."""
    seed: int = 0
    """Seed of the mistakes, names and numbers; give training and evaluation different ones."""
    command_s: float = Field(30.0, gt=0)
    """Seconds that a command may run."""
    memory_mib: int = Field(1024, ge=64)
    """MiB of memory of a command."""
    prompt: str = (
        "This folder holds a Python module and its tests, `{test}`, of which at least one fails. Find the mistake in "
        "the module with the tools, mend it, and say so when `python3 {test}` passes."
    )
    """What the user says; `{test}` stands for the file of tests."""


class BugFixData(vf.TaskData):
    """One task: which repository, and the limits of its commands."""

    number: int
    seed: int
    command_s: float
    memory_mib: int

    @property
    def repository(self) -> Repository:
        return repository(self.number, self.seed)

    @property
    def limits(self) -> Limits:
        return Limits(self.command_s, self.memory_mib)


class BugFixTask(vf.Task[BugFixData, vf.State]):
    """Mend a module."""

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        made = self.data.repository
        await runtime.write(made.module_path, made.module.encode())
        await runtime.write(made.test_path, made.tests.encode())

    @vf.reward
    async def mended(self, task: BugFixData, trace: vf.Trace, runtime: vf.Runtime) -> float:
        """1 if every test passes, as the tests were before the episode."""
        made, word = task.repository, uuid.uuid4().hex
        await runtime.write(made.test_path, made.tests.encode())
        program = ["python3", "-I", "-B", "-c", CHECK, made.test_path.removesuffix(".py"), word]
        checked = await run(runtime, program, task.limits)
        return float(f"{word} {made.num_tests} True" in checked.stdout)


class BugFixTaskset(vf.Taskset[BugFixTask, BugFixConfig]):
    """Repositories with one mistake each."""

    def load(self) -> Iterator[BugFixTask]:
        config = self.config
        for number in range(config.num_tasks):
            prompt = config.prompt.replace("{test}", repository(number, config.seed).test_path)
            yield BugFixTask(BugFixData(prompt=prompt, number=number, seed=config.seed, command_s=config.command_s,
                                        memory_mib=config.memory_mib), config.task)  # fmt: skip


class BugFixHarness(ToolHarness):
    """Reads, writes and runs until it answers."""

    EXECUTES_CODE = True

    def tools(self, data: BugFixData, runtime: vf.Runtime) -> Sequence[Callable[..., str | Awaitable[str]]]:
        async def read_file(path: str) -> str:
            """The text of a file."""
            try:
                return (await runtime.read(path, READ_BYTES)).decode(errors="replace")
            except vf.SandboxError as error:
                return f"error: {error}"

        async def write_file(path: str, text: str) -> str:
            """Replaces a file, or makes a new one."""
            await runtime.write(path, text.encode())
            return "written"

        async def run_command(command: str) -> str:
            """What a shell command prints, errors included, and its exit status."""
            done = await run(runtime, ["sh", "-c", command], data.limits)
            return f"{done.stdout}\nexit status {done.exit_code}"

        return read_file, write_file, run_command
