import asyncio
import io

import pytest
import verifiers.v1 as vf
from PIL import Image

from prime_hpc.config.env import SourceConfig
from prime_hpc.config.sections import ModelConfig
from prime_hpc.envs.colour_row.squares import draw, share_in_place
from prime_hpc.envs.colour_row.taskset import ColourRowTask
from prime_hpc.envs.environment import Environment
from prime_hpc.errors import CorruptData, EnvironmentFailure
from prime_hpc.transport.images import decode, from_data_uri, to_data_uri

ID = "prime_hpc.envs.colour_row"
LETTERS = {"colours": {"r": "#ff0000", "g": "lime"}, "separator": ""}
RED, LIME, WHITE = (255, 0, 0), (0, 255, 0), (255, 255, 255)


def load(**args) -> Environment:
    return Environment("squares", SourceConfig(id=ID, args=args), ModelConfig())


def grade(task: ColourRowTask, reply: str) -> float:
    message = vf.MessageNode(message=vf.AssistantMessage(content=reply), sampled=True)
    trace = vf.Trace(task=vf.TraceTask(type="t", data=task.data, key="k"), nodes=[message],
                     agent=vf.AgentInfo(config=vf.AgentConfig(), name="agent"))  # fmt: skip
    return asyncio.run(task.named(task.data, trace))


def test_squares_lie_in_a_row() -> None:
    image = decode(draw(["red", "lime", "white"], 4))
    assert image.size == (12, 4) and image.mode == "RGB"
    assert [image.getpixel((x, y)) for x, y in ((0, 0), (3, 3), (4, 0), (7, 3), (8, 0), (11, 3))] == [
        RED, RED, LIME, LIME, WHITE, WHITE,
    ]  # fmt: skip


def test_a_task_shows_the_row_that_is_its_answer() -> None:
    task = load(**LETTERS, num_tasks=3, min_len=2, max_len=2, side=4, prompt="which").tasks[2]
    image, text = task.data.prompt[0].content
    assert text.text == "which" and task.key == f"2-{''.join(task.data.answer)}"
    shown = decode(from_data_uri(image.image_url.url))
    assert [shown.getpixel((4 * i, 0)) for i in range(2)] == [{"r": RED, "g": LIME}[c] for c in task.data.answer]


def test_seeds_make_different_rows_and_repeat_themselves() -> None:
    first, again, other = ([t.data.answer for t in map(load(num_tasks=50, seed=s).tasks.__getitem__, range(50))]
                           for s in (1, 1, 2))  # fmt: skip
    assert first == again != other


def test_a_reply_counts_by_names_at_their_places() -> None:
    assert share_in_place(["red", "blue"], ["red", "green"]) == 0.5
    assert share_in_place(["red", "red", "red", "red"], ["red"]) == 0.25
    assert share_in_place([], ["red"]) == 0
    exact, similar = (
        load(num_tasks=1, min_len=2, max_len=2, reward=reward).tasks[0] for reward in ("exact", "similar")
    )
    answer = exact.data.answer
    half = f"{answer[0]} nothing"
    assert [grade(exact, " ".join(answer)), grade(exact, half), grade(similar, half)] == [1.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"min_len": 5, "max_len": 4}, "min_len is 5, more than max_len"),
        ({"colours": {"red": "no colour"}}, "unknown color specifier: 'no colour'"),
        ({"separator": ""}, "'red' cannot be told from its neighbours"),
        ({"colours": {"light red": "#ff8888"}}, "'light red' cannot be told"),
    ],
)
def test_wrong_arguments_are_told(args: dict, told: str) -> None:
    with pytest.raises(EnvironmentFailure, match=told):
        load(**args)


def test_what_is_behind_a_transparent_image_is_white() -> None:
    out = io.BytesIO()
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    image.putpixel((1, 0), (0, 255, 0, 255))
    image.save(out, "PNG")
    seen = decode(from_data_uri(to_data_uri(out.getvalue())))
    assert (seen.mode, seen.getpixel((0, 0)), seen.getpixel((1, 0))) == ("RGB", WHITE, LIME)


def test_an_image_that_is_none_is_named() -> None:
    with pytest.raises(CorruptData, match="of 4 bytes cannot be decoded"):
        decode(b"text")
