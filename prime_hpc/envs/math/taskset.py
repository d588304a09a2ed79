"""The verifiers taskset of `math`."""

import importlib.util
import json
import random
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf
from pydantic import Field, model_validator

from prime_hpc.envs.chat import ChatHarness
from prime_hpc.envs.killable import KillablePool

CHECK = "prime_hpc.envs.math_check.is_right"


class MathConfig(vf.TasksetConfig):
    """Arguments of the environment."""

    data: str | None = None
    """JSONL file with `question` and `answer` a row; procedural linear equations when left out."""
    num_tasks: int = Field(10_000, ge=1)
    """Number of procedural tasks."""
    seed: int = 0
    """Seed of the procedural tasks."""
    largest: int = Field(20, ge=2)
    """Largest number in them."""
    prompt: str = "{question} Give the answer in \\boxed{}."
    """What the user says; `{question}` stands for the question."""
    check_s: float = Field(20.0, gt=0)
    """A check that takes longer is killed, and the episode has no reward."""

    @model_validator(mode="after")
    def _can_check(self) -> "MathConfig":
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("math-verify is not installed: pip install 'prime-hpc[math]'")
        return self


class MathData(vf.TaskData):
    """One task."""

    answer: str
    check_s: float


class MathTask(vf.Task[MathData, vf.State]):
    """Answer a question."""

    def __init__(self, data: MathData, config: vf.TaskConfig | None = None, checks: KillablePool | None = None):
        super().__init__(data, config)
        self._checks = checks or KillablePool(CHECK)

    @vf.reward
    async def right(self, task: MathData, trace: vf.Trace) -> float:
        """1 for an answer that equals the right one."""
        return float(await self._checks.call([trace.last_reply, task.answer], task.check_s))


class MathTaskset(vf.Taskset[MathTask, MathConfig]):
    """Questions of a file, or equations."""

    def load(self) -> Iterator[MathTask]:
        config, checks = self.config, KillablePool(CHECK)
        rows = map(json.loads, Path(config.data).open()) if config.data else equations(config)
        for row in rows:
            prompt = config.prompt.replace("{question}", row["question"])
            data = MathData(prompt=prompt, answer=str(row["answer"]), check_s=config.check_s)
            yield MathTask(data, config.task, checks)


class MathHarness(ChatHarness):
    """One reply."""


def equations(config: MathConfig) -> Iterator[dict[str, str]]:
    """`a x + b = c x + d` with a fraction for an answer."""
    generator = random.Random(config.seed)
    for _ in range(config.num_tasks):
        a, c = generator.sample(range(1, config.largest + 1), 2)
        b, d = (generator.randint(-config.largest, config.largest) for _ in range(2))
        question = f"Solve {a}x {'+' if b >= 0 else '-'} {abs(b)} = {c}x {'+' if d >= 0 else '-'} {abs(d)} for x."
        yield {"question": question, "answer": f"\\frac{{{d - b}}}{{{a - c}}}"}
