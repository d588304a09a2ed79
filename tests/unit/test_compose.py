"""Tolerant overrides, choices of groups, and the origin of every value."""

from pathlib import Path

import pytest

from prime_hpc.config import compose


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("max_steps=3", "++max_steps=3"),
        ("optimizer.lr=1e-5", "++optimizer.lr=1e-5"),
        ("launcher=local", "launcher=local"),
        ("launcher.name=local", "++launcher.name=local"),
        ("+experiment=reverse_text", "+experiment=reverse_text"),
        ("hydra.verbose=true", "hydra.verbose=true"),
        ("hydra/launcher=basic", "hydra/launcher=basic"),
        ("~loss", "~loss"),
        ("-m", "-m"),
        ("--config-dir=site", "--config-dir=site"),
    ],
)
def test_only_values_are_let_through(argument: str, expected: str) -> None:
    assert compose.tolerant([argument]) == [expected]


def test_a_choice_without_a_file_names_the_nearest() -> None:
    arguments = ["+experiment=reverse_txt", "launcher=local", "max_steps=1"]
    (problem,) = compose.unknown_choices(arguments, [compose.conf_dir()])
    assert problem.key == "experiment" and problem.nearest == "reverse_text"


def test_every_value_says_where_it_comes_from(tmp_path: Path) -> None:
    for name, text in {"run": "seed: 1\n", "experiment/mine": "max_steps: 7\noptimizer: {lr: 0.1}\n",
                       "optimizer/adamw": "name: adamw\nlr: 0.2\n"}.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    choices = {"experiment": "mine", "optimizer": "adamw"}
    stack = compose.layers(choices, ["++optimizer.eps=1e-9", "launcher=local"], [tmp_path])
    config = {"seed": 1, "max_steps": 7, "seq_len": 64, "optimizer": {"name": "adamw", "lr": 0.1, "eps": 1e-9}}
    assert compose.annotated_yaml(config, stack) == (
        "seed: 1  # conf/run.yaml\n"
        "max_steps: 7  # experiment/mine\n"
        "seq_len: 64  # default\n"
        "optimizer:\n"
        "  name: adamw  # optimizer/adamw\n"
        "  lr: 0.1  # experiment/mine\n"
        "  eps: 1.0e-09  # command line\n"
    )


def test_conf_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (compose.conf_dir() / "run.yaml").is_file()


def test_a_key_below_one_that_was_set_as_a_whole_is_of_the_command_line_too() -> None:
    stack = compose.layers({}, ["++inference.env={A: b}", "++inference.env.C=d"], [compose.conf_dir()])
    assert compose.origin(("inference", "env", "C"), stack) == "command line"
    assert compose.origin(("inference", "replicas"), stack) == "default"
