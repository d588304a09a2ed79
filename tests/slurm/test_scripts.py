"""What Slurm is given, word for word: batch scripts, step commands, and the templates that a site edits."""

import subprocess

import pytest

from tests.slurm.scripts import EXPERIMENTS, GOLDEN, LAUNCHERS, texts
from tools import sbatch_templates
from tools.sbatch_templates import TEMPLATES

CASES = [(experiment, launcher) for experiment in EXPERIMENTS for launcher in LAUNCHERS]


@pytest.mark.parametrize(("experiment", "launcher"), CASES)
def test_scripts_and_steps_are_the_golden_ones(experiment: str, launcher: str) -> None:
    rendered = texts(experiment, launcher)
    golden = {name: (GOLDEN / name).read_text() for name in rendered}
    assert rendered == golden, "run python -m tests.slurm.scripts and read the difference"


def test_no_golden_text_is_left_over() -> None:
    rendered = {name for case in CASES for name in texts(*case)}
    assert rendered == {path.name for path in GOLDEN.iterdir()}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_what_its_configuration_makes_of_it(name: str) -> None:
    path = sbatch_templates.FOLDER / f"{name}.sbatch"
    assert path.read_text() == TEMPLATES[name].render(name), "run python -m tools.sbatch_templates"
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0


def test_no_template_is_left_over() -> None:
    assert {path.stem for path in sbatch_templates.FOLDER.glob("*.sbatch")} == set(TEMPLATES)
