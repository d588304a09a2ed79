"""The verifiers taskset and environment of `alphabet_sort`."""

import random
from collections.abc import Iterator
from difflib import SequenceMatcher

import verifiers.v1 as vf
from pydantic import Field

from prime_hpc.envs.chat import ChatHarness
from prime_hpc.envs.reverse_text.words import LETTERS


class AlphabetSortConfig(vf.TasksetConfig):
    """Arguments of the environment."""

    num_tasks: int = Field(10_000, ge=1)
    """Number of tasks."""
    seed: int = 0
    """Seed of the names; give training and evaluation different ones."""
    turns: int = Field(3, ge=1)
    """Times that names come in."""
    names: int = Field(3, ge=1)
    """Names that come in each time."""
    letters: int = Field(4, ge=1)
    """Letters of a name."""
    alphabet: str = Field(LETTERS, min_length=1)
    """Letters of the names."""
    separator: str = "\n"
    """What stands between names, in messages and in replies."""
    opening: str = "Sort these names alphabetically, one a line:\n{names}"
    """First message; `{names}` stands for the names."""
    further: str = "Now with these as well, all in one list:\n{names}"
    """Every further message."""


class AlphabetSortData(vf.TaskData):
    """One task. `further` are the messages after the prompt, `answers` the sorted names after each message."""

    further: list[str]
    answers: list[list[str]]
    separator: str


class AlphabetSortTask(vf.Task[AlphabetSortData, vf.State]):
    """Keep a list sorted."""

    @vf.reward
    async def sorted_names(self, task: AlphabetSortData, trace: vf.Trace) -> float:
        """Mean over the turns of how much of the reply is the sorted list, line by line; 0 for turns not played."""
        replies = [(m.content or "").strip().split(task.separator) for m in trace.assistant_messages]
        return sum(_likeness(*pair) for pair in zip(replies, task.answers, strict=False)) / len(task.answers)

    @vf.metric
    async def last_exact(self, task: AlphabetSortData, trace: vf.Trace) -> float:
        """Whether the last list is right."""
        return float(
            trace.num_turns == len(task.answers) and trace.last_reply.split(task.separator) == task.answers[-1]
        )


class AlphabetSortTaskset(vf.Taskset[AlphabetSortTask, AlphabetSortConfig]):
    """Random names."""

    def load(self) -> Iterator[AlphabetSortTask]:
        config, generator = self.config, random.Random(self.config.seed)
        for _ in range(config.num_tasks):
            names = ["".join(generator.choices(config.alphabet, k=config.letters))
                     for _ in range(config.turns * config.names)]  # fmt: skip
            ends = range(config.names, len(names) + 1, config.names)
            texts = [config.separator.join(names[end - config.names : end]) for end in ends]
            opening, *further = (template.replace("{names}", text) for template, text in zip(
                [config.opening] + [config.further] * (config.turns - 1), texts, strict=True))  # fmt: skip
            data = AlphabetSortData(prompt=opening, further=further, separator=config.separator,
                                    answers=[sorted(names[:end]) for end in ends])  # fmt: skip
            yield AlphabetSortTask(data, config.task)


class AlphabetSortHarness(ChatHarness):
    """One reply a turn."""


class AlphabetSortEnvConfig(vf.EnvConfig):
    """The one agent."""

    agent: vf.AgentConfig = vf.AgentConfig()


class AlphabetSortEnv(vf.Env[AlphabetSortEnvConfig]):
    """Brings the names in."""

    async def run(self, task: AlphabetSortTask, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn()
            for message in task.data.further:
                if segment.terminated:
                    break
                segment = await talk.turn(message)


def _likeness(reply: list[str], answer: list[str]) -> float:
    return SequenceMatcher(None, reply, answer, autojunk=False).ratio()
