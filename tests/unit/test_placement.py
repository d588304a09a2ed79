"""Placement on nodes of Slurm: groups, engines and ranks, and the restart units that become job steps."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from prime_hpc.config.compose import compose_run
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import parse
from prime_hpc.config.sizes import trainer_ranks
from prime_hpc.plan.build import Attempt, build_plan
from prime_hpc.plan.placement import Slot, place
from prime_hpc.plan.run_plan import NodeGroup, RunPlan, load
from prime_hpc.plan.units import units

EIGHT = "cluster.gpus_per_node=8"


HETJOB, SINGLE = "launcher.name=slurm_hetjob", "launcher.name=slurm_single"


def make_config(*arguments: str) -> RunConfig:
    source = "env.train=[{id: prime_hpc.envs.reverse_text}]"
    return parse(OmegaConf.to_container(OmegaConf.from_dotlist([source, *arguments])))


def make_plan(*arguments: str) -> RunPlan:
    return build_plan(make_config(*arguments), Path("/shared/run"), Attempt(), gpus=0)


@pytest.fixture(scope="module")
def large() -> RunPlan:
    """Engines of four nodes each."""
    config = compose_run(["+experiment=glm5_swe", "launcher=dry_run", "model.path=/models/m"])
    return build_plan(config, Path("/shared/run"), Attempt(), gpus=0)


def shape(plan: RunPlan) -> dict[str, tuple[int, int, int, int]]:
    """First node, nodes, spare nodes and GPUs a node, by group."""
    return {g.name: (g.first, g.nodes, g.spare, g.gpus) for g in plan.groups}


def test_groups_of_a_hetjob_follow_one_another_orchestrator_first() -> None:
    spare = ["cluster.components.inference.spare_nodes=1", "cluster.components.orchestrator.spare_nodes=1"]
    plan = make_plan(HETJOB, EIGHT, "inference.replicas=12", "trainer.ranks=16", *spare)
    assert list(shape(plan)) == ["orchestrator", "inference", "trainer"]
    assert shape(plan) == {"orchestrator": (0, 1, 1, 0), "inference": (2, 2, 1, 6), "trainer": (5, 2, 0, 8)}
    assert plan.nodes == 7
    seventh, ninth = plan.process("inference-6"), plan.process("trainer-9")
    assert (seventh.node, seventh.gpus, plan.host(seventh)) == (1, [0], 3)
    assert (ninth.node, ninth.gpus, plan.host(ninth)) == (1, [1], 6)


def test_environments_run_beside_the_orchestrator() -> None:
    plan = make_plan(HETJOB, EIGHT)
    worker = plan.process("env-reverse_text-1")
    assert plan.group(worker) == NodeGroup(name="orchestrator", first=0, nodes=1, gpus=0)
    assert plan.host(worker) == plan.host(plan.process("orchestrator-0")) == 0


def test_an_engine_may_take_several_nodes(large: RunPlan) -> None:
    assert shape(large) == {"orchestrator": (0, 1, 0, 0), "inference": (1, 16, 0, 8), "trainer": (17, 32, 0, 8)}
    assert len(large.of("trainer")) == 256
    assert [p.name for p in large.engines()] == [f"inference-{i}" for i in range(4)]
    third = [p for p in large.of("inference") if p.index == 2]
    assert [(p.name, p.rank, p.node) for p in third] == [
        ("inference-2", 0, 8), ("inference-2-node-1", 1, 9), ("inference-2-node-2", 2, 10),
        ("inference-2-node-3", 3, 11),
    ]  # fmt: skip
    assert {tuple(p.gpus) for p in third} == {tuple(range(8))}


def test_several_engines_share_a_node() -> None:
    arguments = [HETJOB, EIGHT, "inference.replicas=3", "inference.gpus_per_replica=4"]
    plan = make_plan(*arguments)
    assert [(p.node, p.gpus) for p in plan.of("inference")] == [(0, [0, 1, 2, 3]), (0, [4, 5, 6, 7]), (1, [0, 1, 2, 3])]
    spread = make_plan(*arguments, "cluster.components.inference.nodes=3")
    assert [(p.node, p.gpus) for p in spread.of("inference")] == [(i, [0, 1, 2, 3]) for i in range(3)]
    assert shape(spread)["inference"] == (1, 3, 0, 4)


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        (["launcher.name=local", EIGHT], 1),
        ([HETJOB, EIGHT], 8),
        ([HETJOB, EIGHT, "cluster.components.trainer.nodes=4"], 32),
        ([HETJOB, EIGHT, "cluster.components.trainer.nodes=4", "trainer.ranks=8"], 8),
        ([HETJOB, EIGHT, "cluster.components.trainer.nodes=4", "trainer.device=cpu"], 4),
        ([HETJOB, "cluster.gpus_per_node=0"], 1),
    ],
)
def test_ranks_are_nodes_times_gpus_unless_given(arguments: list[str], ranks: int) -> None:
    assert trainer_ranks(make_config(*arguments)) == ranks


def test_one_allocation_is_a_single_node_where_everything_fits() -> None:
    plan = make_plan(SINGLE, EIGHT, "inference.replicas=4", "trainer.ranks=4")
    assert plan.nodes == 1
    assert set(shape(plan).values()) == {(0, 1, 0, 8)}
    assert [p.gpus for p in plan.of("trainer")] == [[4], [5], [6], [7]]
    shared = make_plan(SINGLE, EIGHT, "inference.replicas=8", "trainer.ranks=8", "trainer.share_gpu=true")
    assert (shared.nodes, [p.gpus for p in shared.of("trainer")]) == (1, [[i] for i in range(8)])


def test_in_one_allocation_the_orchestrator_is_a_guest_of_the_first_engine() -> None:
    spare = "cluster.components.trainer.spare_nodes=1"
    plan = make_plan(SINGLE, EIGHT, "inference.replicas=8", "trainer.ranks=8", spare)
    assert shape(plan) == {"orchestrator": (0, 1, 0, 8), "inference": (0, 1, 0, 8), "trainer": (1, 1, 1, 8)}
    assert plan.nodes == 3


@pytest.mark.parametrize(("mode", "groups"), [("sft", ["trainer"]), ("serve", ["inference"])])
def test_a_run_without_rollouts_has_one_group(mode: str, groups: list[str]) -> None:
    plan = make_plan(HETJOB, EIGHT, f"mode={mode}", "trainer.ranks=2")
    assert list(shape(plan)) == groups
    assert {p.component for p in plan.processes} == set(groups)


def test_units_are_what_restarts_together(large: RunPlan) -> None:
    plan = make_plan(HETJOB, EIGHT, "inference.replicas=2", "trainer.ranks=16", "env.workers=3")
    found = {unit.name: (unit.first_node, unit.nodes, unit.per_node) for unit in units(plan)}
    assert found == {"orchestrator": (0, 1, 1), **{f"env-reverse_text-{i}": (0, 1, 1) for i in range(3)},
                     "inference-0": (0, 1, 1),
                     "inference-1": (0, 1, 1), "trainer": (0, 2, 8)}  # fmt: skip
    engine = next(unit for unit in units(large) if unit.name == "inference-3")
    assert (engine.first_node, engine.nodes, engine.per_node) == (12, 4, 1)


def test_a_plan_does_not_depend_on_this_machine_and_survives_its_file(tmp_path: Path, large: RunPlan) -> None:
    config = make_config(HETJOB, EIGHT, "trainer.ranks=2")
    assert place(config, gpus=0) == place(config, gpus=3)
    assert place(config, gpus=0).ranks == [Slot(0, [0]), Slot(0, [1])]
    (tmp_path / "plan.json").write_bytes(large.dump())
    assert load(tmp_path / "plan.json") == large
