"""The verifiers taskset and harness of `colour_row`."""

from collections.abc import Iterator
from itertools import islice
from typing import Literal

import verifiers.v1 as vf
from PIL import ImageColor
from pydantic import Field, model_validator

from prime_hpc.envs.chat import ChatHarness
from prime_hpc.envs.colour_row.squares import COLOURS, draw, rows_of, share_in_place
from prime_hpc.transport.images import to_data_uri


class ColourRowConfig(vf.TasksetConfig):
    """Arguments of the environment."""

    num_tasks: int = Field(10_000, ge=1)
    """Number of tasks."""
    seed: int = 0
    """Seed of the rows; give training and evaluation different ones."""
    min_len: int = Field(2, ge=1)
    """Squares of the shortest row."""
    max_len: int = Field(4, ge=1)
    """Squares of the longest row."""
    side: int = Field(32, ge=1)
    """Pixels of a side of a square."""
    colours: dict[str, str] = Field(COLOURS, min_length=1)
    """What each colour is called and how it looks: a name or `#rrggbb`."""
    separator: str = " "
    """What stands between the names in the answer; with none, every name must be one character."""
    reward: Literal["exact", "similar"] = "exact"
    """exact: 1 for the whole row, else 0. similar: the share of names at their places."""
    prompt: str = "Name the colours from left to right."
    """What the user says behind the image."""

    @model_validator(mode="after")
    def _fits(self) -> "ColourRowConfig":
        if self.min_len > self.max_len:
            raise ValueError(f"min_len is {self.min_len}, more than max_len, which is {self.max_len}")
        for name, colour in self.colours.items():
            ImageColor.getrgb(colour)
            if self.separator in name if self.separator else len(name) != 1:
                raise ValueError(f"{name!r} cannot be told from its neighbours with the separator {self.separator!r}")
        return self


class ColourRowData(vf.TaskData):
    """One task."""

    answer: list[str]
    separator: str
    graded_by: Literal["exact", "similar"]


class ColourRowTask(vf.Task[ColourRowData, vf.State]):
    """Reply with the names of the colours."""

    @property
    def key(self) -> str:
        return f"{self.data.idx}-{self.data.separator.join(self.data.answer)}"

    @vf.reward
    async def named(self, task: ColourRowData, trace: vf.Trace) -> float:
        """The reward."""
        share = share_in_place(_names(trace.last_reply, task.separator), task.answer)
        return share if task.graded_by == "similar" else float(share == 1)

    @vf.metric
    async def exact_match(self, task: ColourRowData, trace: vf.Trace) -> float:
        """Whether all names are right, however the reward is measured."""
        return float(_names(trace.last_reply, task.separator) == task.answer)


class ColourRowTaskset(vf.Taskset[ColourRowTask, ColourRowConfig]):
    """Random rows."""

    def load(self) -> Iterator[ColourRowTask]:
        config = self.config
        rows = rows_of(config.seed, list(config.colours), config.min_len, config.max_len)
        for row in islice(rows, config.num_tasks):
            image = to_data_uri(draw([config.colours[name] for name in row], config.side))
            parts = [vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url=image))]
            if config.prompt:
                parts.append(vf.TextContentPart(text=config.prompt))
            data = ColourRowData(prompt=[vf.UserMessage(content=parts)], answer=row, separator=config.separator,
                                 graded_by=config.reward)  # fmt: skip
            yield ColourRowTask(data, config.task)


class ColourRowHarness(ChatHarness):
    """One reply, asked for in the worker itself."""


def _names(reply: str, separator: str) -> list[str]:
    return reply.split(separator) if separator else list(reply)
