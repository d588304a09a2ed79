"""`python -m prime_hpc.plan`: a dry run of whatever launch the arguments describe."""

import subprocess
import sys
from pathlib import Path

from prime_hpc.commands.plan import dry


def test_the_chosen_launcher_becomes_the_target_of_a_dry_run() -> None:
    assert dry(["+experiment=a", "launcher=slurm_single", "seed=1"]) == [
        "+experiment=a", "seed=1", "launcher=dry_run", "launcher.target=slurm_single"]  # fmt: skip
    assert dry(["launcher=dry_run", "launcher.target=local"]) == ["launcher.target=local", "launcher=dry_run"]


def test_a_shape_without_a_folder_is_estimated_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "prime_hpc.plan", "+experiment=bench_trainer", "model=qwen3_moe_3b",
               f"run.output_dir={tmp_path}"]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True).stdout
    assert "estimates for 2.96B parameters" in shown
    assert "disk: logs alone" in shown


def test_the_command_prints_estimates_and_starts_nothing(tmp_path: Path, tiny_model: Path) -> None:
    command = [sys.executable, "-m", "prime_hpc.plan", "+experiment=reverse_text_cpu", f"model.path={tiny_model}",
               f"run.output_dir={tmp_path}", "run.name=mine"]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert any(line.startswith("trainer rank  2         -") for line in lines)
    assert any(line.startswith("disk: ") for line in lines)
    assert "nothing was started" in " ".join(shown.stdout.split())
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["config.yaml", "plan.json"]
