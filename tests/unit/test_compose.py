"""Tolerant overrides, choices of groups, and the origin of every value."""

import subprocess
import sys
from pathlib import Path

import pytest

from prime_hpc import launch
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
    (begun,) = compose.unknown_choices(["launcher=slurm"], [compose.conf_dir()])
    assert begun.nearest == "slurm_hetjob"


def test_a_configuration_folder_that_is_absent_is_named(tmp_path: Path) -> None:
    (tmp_path / "my_conf").mkdir()
    (problem,) = compose.absent_folders([tmp_path / "my_conff", tmp_path / "my_conf", compose.conf_dir()])
    assert str(problem) == (f"--config-dir = '{tmp_path}/my_conff': expected an existing folder; did you mean "
                            f"'{tmp_path}/my_conf'?")  # fmt: skip
    (elsewhere,) = compose.absent_folders([tmp_path / "absent" / "conf"])
    assert elsewhere.nearest is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["+experiment=reverse_text_cpu", "env.train.1.id=foo"],
         "1 problem in the configuration:\n  env.train.1.id = 'foo': expected an element that the list has; to add "
         "one, write the whole list: env.train=[..., ...]\n"),
        (["seed=1,2"], "Ambiguous value for argument '++seed=1,2'\n1. "),
        (["--config-dir", "absent", "+experiment=mine"],
         "1 problem in the configuration:\n  --config-dir = 'absent': expected an existing folder\n"),
    ],
)  # fmt: skip
def test_what_cannot_be_composed_is_told_in_words(arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # restored after what `cli` sets
    monkeypatch.setattr(sys, "argv", ["launch", *arguments])
    with pytest.raises(SystemExit) as ended:
        launch.cli()
    assert (ended.value.code, capsys.readouterr().err[: len(said)]) == (2, said)


@pytest.mark.parametrize(("text", "said"), [
    ("# @package _global_\nmax_steps: 3\n env: {", "{file}, line 3 = ' env: {{': expected YAML (mapping "),
    ("max_steps: 3\nseed: 1\n", "experiment = 'mine': expected a file that begins with the line `# @package _global_`, "
     "without which its keys (max_steps, seed) lie below `experiment`"),
    ("# @package _global_\ncluster: {time: 24:00:00}\n",
     "cluster.time = 86400: expected text in quotes: without them YAML reads some texts as numbers"),
])  # fmt: skip
def test_a_file_of_the_user_s_that_cannot_be_read_is_told_in_words(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(text)
    command = [sys.executable, "-m", "prime_hpc.launch", "--config-dir", str(tmp_path), "+experiment=mine"]
    done = subprocess.run(command, capture_output=True, text=True)  # as Hydra turns the loggers of its process off
    assert done.returncode == 2
    assert done.stderr.startswith(f"1 problem in the configuration:\n  {said.format(file=file)}")


@pytest.mark.parametrize("experiment", ["tiny_sft_cpu", "reverse_text_sft_cpu", "reverse_text_sft"])
def test_rows_of_a_warm_up_lie_beside_its_model(experiment: str) -> None:
    config = compose.compose_run([f"+experiment={experiment}", "model.path=/other"])
    assert [file.path for file in config.trainer.sft.data] == ["/other/sft.jsonl"]


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
