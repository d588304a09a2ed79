"""The scripts in sbatch/: Slurm takes each as it is, and they run once they are edited for a small site."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.runs import REPOSITORY
from tools.sbatch_templates import FOLDER, TEMPLATES
from tools.slurm_sandbox import SlurmSandbox
from tools.slurm_sandbox.packages import missing_programs
from tools.slurm_sandbox.waiting import wait_for

pytestmark = pytest.mark.slurm

WITHOUT_GPUS = {"#SBATCH --gpus-per-node=8\n": "", "cluster.gpus_per_node=8": "cluster.gpus_per_node=0",
                "--cpus-per-task=64": "--cpus-per-task=1", "cluster.cpus=64": "cluster.cpus=1"}  # fmt: skip
FAKE_ENGINES = ("inference.engine=tests.fake_engine", "'inference.engine_args={skill0: 0.5, token_s: 0.003}'")
TINY_RL = ("+experiment=reverse_text ", "+experiment=reverse_text_cpu ")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmSandbox]:
    """Four nodes of 64 processors, three of them with eight GPUs, as the templates want them."""
    if missing := missing_programs():
        pytest.skip(f"{', '.join(missing)} not installed")
    with SlurmSandbox(tmp_path_factory.mktemp("site"), nodes=4, cpus=64, gpus=8) as sandbox:
        yield sandbox


@pytest.fixture
def project(tmp_path: Path, site: SlurmSandbox) -> Iterator[Path]:
    """A folder with the virtual environment that the scripts activate; jobs end with the test."""
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={REPOSITORY}\n")
    yield tmp_path
    site.cancel(site.jobs())


def edit(project: Path, name: str, changes: dict[str, str], *arguments: str) -> Path:
    """A copy of a template with words replaced and arguments added to its launch command."""
    text = (FOLDER / f"{name}.sbatch").read_text()
    for old, new in changes.items():
        assert old in text, f"{name}.sbatch has no {old!r}"
        text = text.replace(old, new)
    run_name = f"    run.name={name} \\\n"
    path = project / f"{name}.sbatch"
    path.write_text(text.replace(run_name, run_name + "".join(f"    {argument} \\\n" for argument in arguments)))
    return path


def run(site: SlurmSandbox, project: Path, script: Path, *states: str) -> str:
    """What a script's job has said once it has ended in one of `states`."""
    job = site.submit(f"--chdir={project}", str(script))
    log = project / f"{script.stem}_{job}.log"
    try:
        assert set(site.wait(job, *states, timeout_s=300).values()) <= set(states)
    except Exception as error:
        error.add_note(log.read_text()[-3000:] if log.exists() else "it has no log")
        raise
    return log.read_text()


@pytest.mark.parametrize("name", TEMPLATES)
def test_slurm_takes_a_template(name: str, site: SlurmSandbox) -> None:
    assert "to start at" in site.run(["sbatch", "--test-only", str(FOLDER / f"{name}.sbatch")]).stderr


def test_preflight_says_what_every_node_has(site: SlurmSandbox, project: Path) -> None:
    output = run(site, project, FOLDER / "preflight.sbatch", "COMPLETED")
    assert output.count("verdict: all 1 nodes are fit") == 3
    lines = [line for line in output.splitlines() if "1 of 1 nodes" in line]
    assert sorted(line.split()[0] for line in lines) == ["node0", "node1", "node2"]
    assert sorted("8 GPUs" in line for line in lines) == [False, True, True]
    assert not list(project.glob(".preflight_*"))


@pytest.mark.slow
def test_the_template_of_rl_runs(site: SlurmSandbox, project: Path, tiny_model: Path) -> None:
    small = {
        TINY_RL[0]: TINY_RL[1],
        "inference.replicas=8": "inference.replicas=1",
        "trainer.ranks=8": "trainer.ranks=2",
    }
    script = edit(project, "hetjob_rl", WITHOUT_GPUS | small, f"model.path={tiny_model}", "max_steps=3", *FAKE_ENGINES,
                  "orchestrator.batch_size=16", "orchestrator.group_size=4")  # fmt: skip
    run(site, project, script, "COMPLETED")
    assert json.loads((project / "outputs" / "hetjob_rl" / "summary.json").read_text())["steps"] == 3


@pytest.mark.slow
def test_the_template_of_sft_runs(site: SlurmSandbox, project: Path) -> None:
    make = [sys.executable, "-m", "tools.make_reverse_text", "--out", str(project / "tiny"), "--seed", "0"]
    subprocess.run(make, cwd=REPOSITORY, check=True)
    small = {
        "+experiment=reverse_text_sft ": "+experiment=reverse_text_sft_cpu ",
        "trainer.ranks=16": "trainer.ranks=2",
    }
    script = edit(project, "sft", WITHOUT_GPUS | small, "model.path=tiny", "trainer.sft.data=tiny/sft.jsonl",
                  "max_steps=3", "cluster.components.trainer.nodes=2")  # fmt: skip
    output = run(site, project, script, "COMPLETED")
    assert "complete; everything lies in" in output and "startup: first step after" in output
    assert (project / "outputs" / "sft" / "model" / "config.json").exists()


@pytest.mark.slow
def test_the_template_of_engines_serves_until_it_is_told_to_stop(
    site: SlurmSandbox, project: Path, tiny_model: Path
) -> None:
    small = {"model.path=models/smollm2": f"model.path={tiny_model}", "inference.replicas=8": "inference.replicas=2"}
    script = edit(project, "inference", WITHOUT_GPUS | small, "seq_len=64", *FAKE_ENGINES)
    job = site.submit(f"--chdir={project}", str(script))
    records = [project / "outputs" / "inference" / "rendezvous" / f"inference-{i}.json" for i in range(2)]
    wait_for(lambda: all(r.exists() and "base_url" in r.read_text() for r in records), "engines", job, 120)
    site.cancel({job})
    assert site.states(job) == {job: "CANCELLED"}
