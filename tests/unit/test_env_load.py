import subprocess
import sys

import pytest

from prime_hpc.config.env import EnvConfig, EvalConfig, SourceConfig
from prime_hpc.config.run import RunConfig
from prime_hpc.envs.load import (
    bundled_environments,
    check_source,
    find_source_problems,
    module_name,
)


@pytest.mark.parametrize("environment_id", ["prime_hpc.envs.reverse_text", "textarena", "owner/textarena@0.3", "json"])
def test_an_installed_environment_is_no_problem(environment_id: str) -> None:
    assert check_source(SourceConfig(id=environment_id)) == []


@pytest.mark.parametrize(
    "environment_id, nearest",
    [
        ("prime_hpc.envs.revers_text", "prime_hpc.envs.reverse_text"),
        ("reverse-text", "prime_hpc.envs.reverse_text"),
        ("textarna", "textarena"),
        ("absent.module", None),
        ("not a module", None),
        ("", None),
    ],
)
def test_an_absent_environment_is_named_with_the_nearest_known_one(environment_id: str, nearest: str | None) -> None:
    [problem] = check_source(SourceConfig(id=environment_id), "env.train.3")
    assert (problem.key, problem.value, problem.nearest) == ("env.train.3.id", environment_id, nearest)
    assert "prime_hpc.envs.reverse_text" in problem.expected


def test_a_file_in_place_of_a_module_is_told_apart() -> None:
    [problem] = check_source(SourceConfig(id="./tickets.py"))
    assert str(problem) == ("env.train.id = './tickets.py': expected the name of a module, not of its file, which "
                            "lies where the launch begins or in PYTHONPATH; did you mean 'tickets'?")  # fmt: skip


def test_every_source_of_a_run_is_checked() -> None:
    known, absent = SourceConfig(id="prime_hpc.envs.reverse_text"), SourceConfig(id="absent")
    config = RunConfig(env=EnvConfig(train=[known, absent], eval=EvalConfig(sources=[absent])))
    assert [p.key for p in find_source_problems(config)] == ["env.train.1.id", "env.eval.sources.0.id"]


def test_ids_stand_for_modules() -> None:
    assert module_name("owner/my-env@1.0") == "my_env"
    assert module_name("my_package.My_Env") == "my_package.My_Env"


def test_bundled_environments_are_found() -> None:
    names = "alphabet_sort bug_fix colour_row kuhn_poker math proposer_solver reverse_text wiki_search wordle"
    assert bundled_environments() == [f"prime_hpc.envs.{name}" for name in names.split()]


def test_checking_does_not_import_verifiers() -> None:
    code = (
        "import sys; from prime_hpc.config.env import SourceConfig; from prime_hpc.envs.load import check_source;"
        "check_source(SourceConfig(id='textarena')); from prime_hpc.envs.reverse_text import rows; next(rows(1));"
        "sys.exit('verifiers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
