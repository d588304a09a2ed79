"""The verifiers taskset and environment of `wordle`."""

import random
import re
from collections.abc import Iterator
from string import ascii_lowercase

import verifiers.v1 as vf
from pydantic import Field

from prime_hpc.envs.chat import ChatHarness
from prime_hpc.envs.wordle.words import WORDS, marks

RULES = (
    "Find the hidden word of five letters. Reply with a guess in angle brackets, e.g. <crane>. Each guess is answered "
    "letter by letter: G right place, Y elsewhere in the word, X not in it. You have {guesses} guesses."
)


class WordleConfig(vf.TasksetConfig):
    """Arguments of the environment."""

    seed: int = 0
    """Seed of the words' order."""
    guesses: int = Field(6, ge=1)
    """Guesses."""
    words: list[str] = WORDS
    """Words to find, all of one length."""
    prompt: str = RULES
    """First message; `{guesses}` stands for their number."""


class WordleData(vf.TaskData):
    """One task."""

    answer: str
    guesses: int


class WordleTask(vf.Task[WordleData, vf.State]):
    """Find the word."""

    @property
    def key(self) -> str:
        return self.data.answer

    @vf.reward
    async def solved(self, task: WordleData, trace: vf.Trace) -> float:
        """1 for the word, less up to a half for the guesses that it took; unsolved, a fifth of the letters in place."""
        guesses = [guess_of(m.content or "", len(task.answer)) for m in trace.assistant_messages]
        if task.answer in guesses:
            return 1.0 - 0.5 * guesses.index(task.answer) / max(1, task.guesses - 1)
        right = [marks(guess, task.answer).count("G") for guess in guesses if guess]
        return 0.2 * max(right, default=0) / len(task.answer)

    @vf.metric
    async def found(self, task: WordleData, trace: vf.Trace) -> float:
        """Whether the word was found."""
        return float(any(guess_of(m.content or "", len(task.answer)) == task.answer for m in trace.assistant_messages))


class WordleTaskset(vf.Taskset[WordleTask, WordleConfig]):
    """Every word once."""

    def load(self) -> Iterator[WordleTask]:
        prompt = self.config.prompt.replace("{guesses}", str(self.config.guesses))
        for word in random.Random(self.config.seed).sample(self.config.words, len(self.config.words)):
            yield WordleTask(WordleData(prompt=prompt, answer=word, guesses=self.config.guesses), self.config.task)


class WordleHarness(ChatHarness):
    """One guess a turn."""


class WordleEnvConfig(vf.EnvConfig):
    """The one agent."""

    agent: vf.AgentConfig = vf.AgentConfig()


class WordleEnv(vf.Env[WordleEnvConfig]):
    """Answers guesses."""

    async def run(self, task: WordleTask, agents: vf.Agents) -> None:
        answer = task.data.answer
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn()
            for _ in range(task.data.guesses - 1):
                guess = guess_of(segment.last_reply, len(answer))
                if segment.terminated or guess == answer:
                    break
                said = marks(guess, answer) if guess else f"That is no guess of {len(answer)} letters."
                segment = await talk.turn(said)


def guess_of(reply: str, length: int) -> str | None:
    """The guess of a reply: the last word in angle brackets, or a reply that is but a word."""
    found = re.findall(rf"<([a-z]{{{length}}})>", reply.lower())
    bare = reply.strip().lower()
    if not found and len(bare) == length and set(bare) <= set(ascii_lowercase):
        return bare
    return found[-1] if found else None
