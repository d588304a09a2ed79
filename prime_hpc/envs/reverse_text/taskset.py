"""The verifiers taskset and harness of `reverse_text`."""

from collections.abc import Iterator
from itertools import islice
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field, model_validator

from prime_hpc.envs.chat import ChatHarness
from prime_hpc.envs.reverse_text.words import LETTERS, PLAIN, similarity, words


class ReverseTextConfig(vf.TasksetConfig):
    """Arguments of the environment."""

    num_tasks: int = Field(10_000, ge=1)
    """Number of tasks."""
    seed: int = 0
    """Seed of the texts; give training and evaluation different ones."""
    min_len: int = Field(8, ge=1)
    """Letters of the shortest text."""
    max_len: int = Field(12, ge=1)
    """Letters of the longest text."""
    alphabet: str = Field(LETTERS, min_length=1)
    """Letters of the texts."""
    separator: str = ""
    """What stands between the letters of a text."""
    reward: Literal["exact", "similarity"] = "exact"
    """exact: 1 for the reversed text, else 0. similarity: Ratcliff and Obershelp's ratio to it."""
    prompt: str = PLAIN
    """What the user says; `{text}` stands for the text."""

    @model_validator(mode="after")
    def _fits(self) -> "ReverseTextConfig":
        if self.min_len > self.max_len:
            raise ValueError(f"min_len is {self.min_len}, more than max_len, which is {self.max_len}")
        if PLAIN not in self.prompt:
            raise ValueError(f"the prompt {self.prompt!r} has no {PLAIN}")
        return self


class ReverseTextData(vf.TaskData):
    """One task."""

    answer: str
    graded_by: Literal["exact", "similarity"]


class ReverseTextTask(vf.Task[ReverseTextData, vf.State]):
    """Reply with the text reversed."""

    @property
    def key(self) -> str:
        return f"{self.data.idx}-{self.data.answer[::-1]}"

    @vf.reward
    async def reversed_text(self, task: ReverseTextData, trace: vf.Trace) -> float:
        """The reward."""
        grade = similarity if task.graded_by == "similarity" else _exact
        return grade(trace.last_reply, task.answer)

    @vf.metric
    async def exact_match(self, task: ReverseTextData, trace: vf.Trace) -> float:
        """Whether the reply is the reversed text, however the reward is measured."""
        return _exact(trace.last_reply, task.answer)


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    """Random texts."""

    def load(self) -> Iterator[ReverseTextTask]:
        config = self.config
        texts = words(config.seed, config.min_len, config.max_len, config.alphabet, config.separator)
        for text in islice(texts, config.num_tasks):
            prompt = config.prompt.replace(PLAIN, text)
            data = ReverseTextData(prompt=prompt, answer=text[::-1], graded_by=config.reward)
            yield ReverseTextTask(data, config.task)


class ReverseTextHarness(ChatHarness):
    """One reply, asked for in the worker itself."""


def _exact(reply: str, answer: str) -> float:
    return float(reply == answer)
