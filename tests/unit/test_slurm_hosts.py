"""Which hosts of a job stand for the plan's nodes, with commands of Slurm that answer from files."""

import os
from pathlib import Path

import pytest

from prime_hpc.errors import NodesLost
from prime_hpc.launchers.slurm.allocation import jobs
from prime_hpc.launchers.slurm.hosts import Hosts
from prime_hpc.plan.run_plan import RunPlan
from tests.unit.test_slurm_steps import make_plan, unit

SPARES = [f"cluster.components.{name}.spare_nodes=1" for name in ("orchestrator", "inference", "trainer")]
SRUN = """
echo "$@" >> {folder}/steps
for name in $(cat {folder}/unfit); do
  case "$*" in *"--nodelist=$name "*) echo started; echo "$name: 0 of 4 GPUs"; echo "srun: failed" >&2; exit 1;; esac
done
"""
COMMANDS = {"scontrol": "echo $3 | tr , '\\n'", "squeue": "cat {folder}/states", "srun": SRUN}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of three parts with ids 41 to 43; `states`, `unfit` and `steps` lie in the folder."""
    for name, body in COMMANDS.items():
        script = tmp_path / name
        script.write_text(f"#!/bin/sh\n{body.format(folder=tmp_path)}\n")
        script.chmod(0o755)
    (tmp_path / "states").write_text("41 RUNNING\n42 RUNNING\n43 RUNNING\n")
    for name in ("unfit", "steps"):
        (tmp_path / name).touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for i, names in enumerate(("c1,c2", "g1,g2", "g3,g4,g5")):
        monkeypatch.setenv(f"SLURM_JOB_NODELIST_HET_GROUP_{i}", names)
        monkeypatch.setenv(f"SLURM_JOB_ID_HET_GROUP_{i}", str(41 + i))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "g1,g2,g3,g4,g5")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    return tmp_path


def hosts_of(plan: RunPlan, said: list[str]) -> Hosts:
    return Hosts(plan, jobs(plan)[0], said.append)


def test_without_spares_no_host_is_named_or_checked(slurm: Path) -> None:
    plan = make_plan("slurm_hetjob")
    hosts = hosts_of(plan, [])
    hosts.settle([unit(plan, "trainer")])
    assert hosts.of(unit(plan, "trainer")) == []
    assert (slurm / "steps").read_text() == ""


def test_a_spare_takes_the_place_of_an_unfit_host(slurm: Path) -> None:
    plan, said = make_plan("slurm_hetjob", *SPARES), []
    hosts = hosts_of(plan, said)
    (slurm / "unfit").write_text("g4")
    hosts.settle([unit(plan, name) for name in ("orchestrator", "env-words-0", "inference-0", "trainer")])
    assert [hosts.of(unit(plan, name)) for name in ("orchestrator", "env-words-0", "inference-0", "trainer")] == [
        ["c1"], ["c1"], ["g1"], ["g3", "g5"]]  # fmt: skip
    assert said == ["g5 takes the place of g4, which is not fit: g4: 0 of 4 GPUs"]
    steps = (slurm / "steps").read_text().splitlines()
    assert sorted(word for step in steps for word in step.split() if word.startswith("--nodelist=")) == [
        f"--nodelist={name}" for name in ("c1", "g1", "g3", "g4", "g5")]  # fmt: skip
    [trainer] = [step for step in steps if "--nodelist=g3" in step]
    assert "--het-group=2" in trainer and "--gpus-per-node=4" in trainer and "/shared/run --gpus=4" in trainer


def test_without_a_fit_spare_the_nodes_are_lost(slurm: Path) -> None:
    plan, said = make_plan("slurm_hetjob", *SPARES), []
    (slurm / "unfit").write_text("g3 g5")
    with pytest.raises(NodesLost, match="g3 is not fit for trainer and no spare is left: g3: 0 of 4 GPUs; exclude it"):
        hosts_of(plan, said).settle([unit(plan, "trainer")])
    assert said == ["the spare node g5 is not fit either: g5: 0 of 4 GPUs"]


def test_nodes_of_a_cancelled_part_are_lost_to_its_units_only(slurm: Path) -> None:
    plan = make_plan("slurm_hetjob")
    hosts = hosts_of(plan, [])
    (slurm / "states").write_text("41 RUNNING\n42 CANCELLED\n43 RUNNING\n")
    hosts.settle([unit(plan, "orchestrator"), unit(plan, "trainer")])
    with pytest.raises(NodesLost, match="the nodes of inference are gone: their part of the job is CANCELLED"):
        hosts.settle([unit(plan, "inference-0")])


def test_a_controller_that_does_not_answer_says_nothing_about_nodes(slurm: Path) -> None:
    plan = make_plan("slurm_hetjob")
    (slurm / "states").write_text("")
    hosts_of(plan, []).settle([unit(plan, "inference-0")])


def test_groups_of_one_allocation_share_its_spares(slurm: Path) -> None:
    plan = make_plan("slurm_single", "cluster.components.inference.spare_nodes=1",
                     "cluster.components.trainer.spare_nodes=1")  # fmt: skip
    hosts = hosts_of(plan, [])
    (slurm / "unfit").write_text("g3 g4")
    hosts.settle([unit(plan, "inference-0"), unit(plan, "trainer")])
    assert (hosts.of(unit(plan, "inference-0")), hosts.of(unit(plan, "trainer"))) == (["g1"], ["g2", "g5"])
