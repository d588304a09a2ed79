"""The verifiers taskset and harness of `wiki_search`."""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import verifiers.v1 as vf
from pydantic import Field

from prime_hpc.envs.tools import ToolHarness
from prime_hpc.envs.wiki_search.corpus import Corpus

HITS = 5


class WikiSearchConfig(vf.TasksetConfig):
    """Arguments of the environment."""

    countries: int = Field(100, ge=1, le=170)
    """Countries of the invented world; each gives three pages and three questions."""
    seed: int = 0
    """Seed of the world and of the questions' order."""
    prompt: str = "{question} Use the tools, then reply with the name alone."
    """What the user says; `{question}` stands for the question."""


class WikiSearchData(vf.TaskData):
    """One task, with what its world is made from."""

    answer: str
    countries: int
    seed: int


class WikiSearchTask(vf.Task[WikiSearchData, vf.State]):
    """Find a name."""

    @vf.reward
    async def right(self, task: WikiSearchData, trace: vf.Trace) -> float:
        """1 for the name."""
        return float(trace.last_reply.strip(" .").lower() == task.answer.lower())

    @vf.metric
    async def calls(self, task: WikiSearchData, trace: vf.Trace) -> float:
        """Calls of tools."""
        return float(sum(len(m.tool_calls or []) for m in trace.assistant_messages))


class WikiSearchTaskset(vf.Taskset[WikiSearchTask, WikiSearchConfig]):
    """Questions about an invented world."""

    def load(self) -> Iterator[WikiSearchTask]:
        config = self.config
        questions = list(world(config.countries, config.seed).questions())
        for question, answer in random.Random(config.seed).sample(questions, len(questions)):
            prompt = config.prompt.replace("{question}", question)
            data = WikiSearchData(prompt=prompt, answer=answer, countries=config.countries, seed=config.seed)
            yield WikiSearchTask(data, config.task)


class WikiSearchHarness(ToolHarness):
    """Searches and reads pages until it answers."""

    def tools(self, data: WikiSearchData, runtime: vf.Runtime) -> Sequence[Callable[..., str]]:
        corpus = world(data.countries, data.seed)

        def search_pages(query: str) -> str:
            """Titles of the pages that have most words of the query."""
            return "\n".join(corpus.search(query, HITS)) or "no page has any of these words"

        def read_page(title: str) -> str:
            """The text of a page."""
            return corpus.pages.get(title, f"error: there is no page {title!r}")

        return search_pages, read_page


@cache
def world(countries: int, seed: int) -> Corpus:
    """The corpus, made once in a process."""
    return Corpus(countries, seed)
