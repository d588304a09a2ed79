"""The demo's scripts: examples that fit the experiment, and the closing summary."""

import json
from pathlib import Path

import pytest

from prime_hpc.envs.kuhn_poker.game import MOVES, blunders
from prime_hpc.envs.kuhn_poker.taskset import CARDS
from tools.make_reverse_text import task_arguments, write_examples
from tools.make_warmup import examples, row
from tools.show_algorithms import CASES, ends
from tools.show_summary import describe

ROWS = 50


def test_examples_are_reversed_words_of_the_experiments_lengths(tmp_path: Path):
    write_examples(tmp_path / "sft.jsonl", ROWS, 0, task_arguments("reverse_text_cpu"))
    rows = [json.loads(line)["messages"] for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert len(rows) == ROWS
    assert {tuple(message["role"] for message in row) for row in rows} == {("user", "assistant")}
    assert all(reply["content"] == question["content"][::-1] for question, reply in rows)
    assert {len(question["content"]) for question, _ in rows} == {8, 9, 10, 11, 12}


def test_examples_of_another_experiment_carry_its_prompt(tmp_path: Path):
    arguments = task_arguments("reverse_text")
    assert "Reverse" in arguments["prompt"]
    write_examples(tmp_path / "sft.jsonl", 1, 0, arguments)
    question, reply = json.loads((tmp_path / "sft.jsonl").read_text())["messages"]
    assert question["content"] == arguments["prompt"].replace("{text}", reply["content"][::-1])


def test_a_seed_decides_the_examples(tmp_path: Path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_examples(tmp_path / name, ROWS, seed, task_arguments("reverse_text_cpu"))
    a, b, c = ((tmp_path / name).read_text() for name in "abc")
    assert a == b != c


def test_examples_of_games_are_right_and_open() -> None:
    for (first, reply), (second, whole) in examples("alphabet_sort_cpu", 0, ROWS):
        assert reply == "z".join(sorted(first.split("z")))
        assert whole == "z".join(sorted([*first.split("z"), *second.split("z")]))
    conversation = [("a", "b"), ("c", "d")]
    assert [m["role"] for m in row(conversation)["messages"]] == ["user", "assistant"] * 2
    made = [turn for conversation in examples("kuhn_poker_cpu", 0, 400) for turn in conversation]
    assert len(made) > 400, "the first player may move twice"
    assert {said.split()[0] for said, _ in made} == {"jack", "queen", "king"}
    mistakes = []
    for said, move in made:
        history = said.partition("So far: ")[2].rstrip(". ").replace(",", "").split()
        assert move in MOVES[" ".join(history)]
        found = blunders(CARDS.index(said.split()[0]), len(history) % 2, [*history, move])
        mistakes += [found["blunder"]] if "blunder" in found else []
    assert 0.15 < sum(mistakes) / len(mistakes) < 0.35, "a mistake by chance is one of two, twice in a row one of four"


def test_summary_shows_the_promised_numbers_the_curve_and_the_newest_logs(tmp_path: Path):
    summary = {"steps": 60, "reward_first5": 0.2375, "reward_last5": 0.8125, "mismatch_abs_mean": 3.47e-07,
               "mismatch_tokens": 900, "wall_s": 223.04}  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "reward_curve.png").touch()
    for attempt in (2, 9, 10):
        (tmp_path / "logs" / f"attempt_{attempt}").mkdir(parents=True)
    assert describe(tmp_path).splitlines() == [
        "steps              60",
        "reward_first5      0.237",
        "reward_last5       0.812",
        "mismatch_abs_mean  3.47e-07",
        "wall_s             223",
        f"reward curve       {tmp_path}/reward_curve.png",
        f"logs               {tmp_path}/logs/attempt_10",
    ]


def test_summary_without_a_curve_or_a_comparison_says_so(tmp_path: Path):
    summary = {"steps": 1, "reward_first5": 0.5, "reward_last5": 0.5, "mismatch_abs_mean": None, "wall_s": 9.0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert describe(tmp_path).splitlines()[-2:] == ["mismatch_abs_mean  None", "wall_s             9"]


def test_the_ends_of_a_metric_never_overlap() -> None:
    rows = [{"nll": float(i)} for i in range(12)]
    assert ends(rows, "nll") == (2.0, 9.0), "five rows each"
    assert ends([{"eval": 0.25}, *rows, {"eval": 0.75}], "eval") == (0.25, 0.75)
    with pytest.raises(SystemExit, match="fewer than two steps have eval"):
        ends([*rows, {"eval": 0.75}], "eval")


def test_cases_have_their_own_rates_and_steps(tmp_path: Path) -> None:
    [poker] = [case.arguments(tmp_path, 7) for case in CASES if case.algorithm == "rae"]
    [sums] = [case.arguments(tmp_path, 7) for case in CASES if case.algorithm == "hierarchical_grpo"]
    assert {"max_steps=40", "optimizer.lr=1e-4", "seed=7", f"model.path={tmp_path}/cards/model"} <= set(poker)
    assert {"max_steps=24", "optimizer.lr=3e-4", "seed=7", f"model.path={tmp_path}/sums/model"} <= set(sums)
