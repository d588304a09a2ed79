from itertools import islice

import pytest

from prime_hpc.config.env import SourceConfig
from prime_hpc.config.sections import ModelConfig
from prime_hpc.envs.environment import Environment
from prime_hpc.envs.reverse_text.words import rows, similarity, words
from prime_hpc.errors import EnvironmentFailure, InfrastructureFailure

ID = "prime_hpc.envs.reverse_text"


def load(num_tasks: int | None = None, **args) -> Environment:
    return Environment("words", SourceConfig(id=ID, args=args, num_tasks=num_tasks), ModelConfig())


def test_words_keep_to_their_lengths_and_letters() -> None:
    drawn = list(islice(words(0, 2, 4, "xy"), 200))
    assert {len(word) for word in drawn} == {2, 3, 4} and set("".join(drawn)) == {"x", "y"}


def test_seeds_make_different_texts_and_repeat_themselves() -> None:
    first, again, other = (list(islice(words(seed, 8, 12), 100)) for seed in (1, 1, 2))
    assert first == again and not set(first) & set(other)


def test_rows_are_conversations_with_the_answer() -> None:
    made = list(rows(3, seed=1, min_len=3, max_len=3, prompt="Turn {text} and {not this}"))
    texts = list(islice(words(1, 3, 3), 3))
    assert made == [
        {"messages": [{"role": "user", "content": f"Turn {text} and {{not this}}"},
                      {"role": "assistant", "content": text[::-1]}]} for text in texts
    ]  # fmt: skip


def test_similarity_is_one_for_the_answer_and_counts_matching_blocks() -> None:
    assert similarity("abc", "abc") == 1.0
    assert similarity("abxc", "abc") == 6 / 7
    assert similarity("", "abc") == 0.0


def test_tasks_are_those_of_the_seed() -> None:
    tasks = load(num_tasks=4, seed=3, min_len=5, max_len=7, prompt="Reverse {text}", reward="similarity").tasks
    texts = list(islice(words(3, 5, 7), 4))
    assert tasks.count == 4
    assert [tasks[i].data.prompt for i in range(4)] == [f"Reverse {text}" for text in texts]
    assert [tasks[i].data.answer for i in range(4)] == [text[::-1] for text in texts]
    assert tasks[2].key == f"2-{texts[2]}"


def test_a_task_past_the_end_is_refused() -> None:
    with pytest.raises(InfrastructureFailure, match="task 4 was asked for, the taskset has 4"):
        load(num_tasks=4).tasks[4]


@pytest.mark.parametrize(
    "args, cause",
    [
        ({"min_len": 5, "max_len": 4}, "args: min_len is 5, more than max_len, which is 4"),
        ({"prompt": "Reverse it"}, "has no {text}"),
        ({"reward": "exakt"}, "args.reward = 'exakt': expected 'exact' or 'similarity'"),
        ({"min_len": "x"}, "args.min_len = 'x': expected a valid integer"),
        ({"max_lenn": 3}, "args.max_lenn = 3: expected one of "),
        ({"max_lenn": 3}, "; did you mean 'max_len'?"),
    ],
)
def test_arguments_are_checked_at_load(args: dict, cause: str) -> None:
    with pytest.raises(EnvironmentFailure, match=f"source 'words': environment '{ID}' does not load: .*") as caught:
        load(**args)
    assert cause in str(caught.value)
