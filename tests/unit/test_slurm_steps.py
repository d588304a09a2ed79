"""Steps of units: where hosts are named, what srun's environment must not hold, and which process a task stands for."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from prime_hpc.config.schema import parse
from prime_hpc.errors import ConfigurationError
from prime_hpc.launchers.children import log_file
from prime_hpc.launchers.slurm.allocation import check_allocation, jobs
from prime_hpc.launchers.slurm.steps import step_command, step_environment
from prime_hpc.launchers.slurm.task import find_process
from prime_hpc.plan.build import Attempt, build_plan
from prime_hpc.plan.run_plan import RunPlan
from prime_hpc.plan.units import Unit, units


def make_plan(launcher: str, *arguments: str) -> RunPlan:
    given = [f"launcher.name={launcher}", "cluster.gpus_per_node=4", "trainer.ranks=8", "env.train=[{id: words}]"]
    config = parse(OmegaConf.to_container(OmegaConf.from_dotlist([*given, *arguments])))
    return build_plan(config, Path("/shared/run"), Attempt(number=2), gpus=0)


def unit(plan: RunPlan, name: str) -> Unit:
    return next(unit for unit in units(plan) if unit.name == name)


def test_named_hosts_take_the_place_of_numbered_nodes() -> None:
    plan = make_plan("slurm_hetjob")
    numbered, named = (step_command(plan, unit(plan, "trainer"), hosts) for hosts in ((), ("n7", "n9")))
    assert [word for word in numbered if word not in named] == ["--relative=0"]
    assert [word for word in named if word not in numbered] == ["--nodelist=n7,n9"]


def test_linked_engines_are_steps_of_their_own_job() -> None:
    plan = make_plan("slurm_linked")
    main, engines = jobs(plan)
    assert [u.name for u in main.units(plan)] == ["orchestrator", "env-words-0", "env-words-1", "trainer"]
    assert [u.name for u in engines.units(plan)] == ["inference-0"]
    assert step_command(plan, unit(plan, "trainer"))[1] == "--het-group=1"
    assert not any(word.startswith("--het-group") for word in step_command(plan, unit(plan, "inference-0")))


def test_srun_does_not_see_what_describes_the_batch_script() -> None:
    environment = {"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[1-2]", "SLURM_NTASKS": "1",
                   "SLURM_MEM_PER_NODE": "500", "CUDA_VISIBLE_DEVICES": "0,1"}  # fmt: skip
    assert list(step_environment(environment)) == ["PATH", "SLURM_JOB_ID", "SLURM_JOB_NODELIST_HET_GROUP_1"]


def test_a_task_is_the_process_at_its_rank_in_its_unit() -> None:
    plan = make_plan("slurm_hetjob")
    found, process = find_process(plan, {"PRIME_HPC_UNIT": "trainer", "SLURM_PROCID": "5"})
    assert found.name == "trainer"
    assert (process.name, process.node, process.gpus) == ("trainer-5", 1, [1])
    assert process.log == "/shared/run/logs/attempt_2/trainer-5.log"


def test_a_restarted_task_writes_a_log_of_its_own() -> None:
    plan = make_plan("slurm_hetjob")
    assert log_file(plan.process("inference-0"), 3) == "/shared/run/logs/attempt_2/inference-0.restart_3.log"


HETJOB_SIZE = {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "3", "SLURM_JOB_NUM_NODES_HET_GROUP_0": "1",
               "SLURM_JOB_NUM_NODES_HET_GROUP_1": "1", "SLURM_JOB_NUM_NODES_HET_GROUP_2": "2"}  # fmt: skip


@pytest.mark.parametrize(
    ("launcher", "environment", "problems"),
    [
        ("slurm_hetjob", HETJOB_SIZE, []),
        ("slurm_hetjob", {**HETJOB_SIZE, "SLURM_JOB_NUM_NODES_HET_GROUP_2": "1"},
         ["cluster.components.trainer.nodes = 2: expected at most the 1 nodes of this allocation"]),
        ("slurm_hetjob", {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"},
         ["launcher.submit = False: expected true; false is for a batch script that runs this command in a "
          "heterogeneous job of 3 groups, and this one has 1 group"]),
        ("slurm_single", {},
         ["launcher.submit = False: expected true; false is for a batch script that runs this command in a job of "
          "equal nodes, and this process is in no job"]),
        ("slurm_single", {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}, []),
        ("slurm_linked", HETJOB_SIZE, ["launcher.submit = False: expected true, since engines are a job of their own"]),
    ],
)  # fmt: skip
def test_an_allocation_that_does_not_fit_is_refused(launcher: str, environment: dict, problems: list[str]) -> None:
    try:
        check_allocation(make_plan(launcher), environment)
    except ConfigurationError as error:
        assert [str(p) for p in error.problems] == problems
    else:
        assert problems == []
