"""Placement: who gets which GPU, and what a plan says."""

from pathlib import Path

import pytest
from rich.console import Console

from prime_hpc.config.env import EvalSourceConfig, SourceConfig
from prime_hpc.config.frozen import FrozenModel
from prime_hpc.config.run import RunConfig
from prime_hpc.config.trainer import SFTFile, SFTValidation
from prime_hpc.errors import ConfigurationError
from prime_hpc.plan.build import Attempt, build_plan
from prime_hpc.plan.placement import place_gpus
from prime_hpc.plan.run_plan import PLAN_SCHEMA, load
from prime_hpc.plan.table import render


def config(ranks: int = 1, replicas: int = 1, **trainer) -> RunConfig:
    made = RunConfig()
    made.env.train = [SourceConfig(id="prime_hpc.envs.reverse_text")]
    made.trainer.ranks, made.inference.replicas = ranks, replicas
    for key, value in trainer.items():
        setattr(made.trainer, key, value)
    return made


def test_without_gpus_nobody_gets_one() -> None:
    assert place_gpus(config(ranks=2), gpus=0) == ([[]], [[], []])


def test_two_gpus_are_split_and_one_is_shared() -> None:
    assert place_gpus(config(), gpus=2) == ([[0]], [[1]])
    assert place_gpus(config(), gpus=1) == ([[0]], [[0]])


def test_tensor_parallel_engines_come_first() -> None:
    made = config(ranks=2, replicas=2)
    made.inference.vllm["tensor_parallel_size"] = 2
    assert place_gpus(made, gpus=8) == ([[0, 1], [2, 3]], [[4], [5]])


def test_too_few_gpus_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigurationError, match="at most 1 GPUs for 1 of inference and 2 of the trainer"):
        place_gpus(config(ranks=2), gpus=1)
    with pytest.raises(ConfigurationError, match="at most 1 GPUs for 1 of inference and 1 of the trainer"):
        place_gpus(config(share_gpu=False), gpus=1)


def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="trainer.device = 'cuda'"):
        place_gpus(config(device="cuda"), gpus=0)


def test_an_evaluation_alone_has_engines_and_the_workers_of_its_sources(tmp_path: Path) -> None:
    made = config()
    made.mode, made.env.train = "sample", []
    made.env.eval.sources = [EvalSourceConfig(id="prime_hpc.envs.reverse_text")]
    plan = build_plan(made, tmp_path / "run", Attempt(), gpus=0)
    assert [p.name for p in plan.processes] == ["orchestrator-0", "env-reverse_text-0", "env-reverse_text-1",
                                                "inference-0"]  # fmt: skip
    console = Console(width=200)
    with console.capture() as captured:
        console.print(render(plan))
    assert captured.get().startswith("run: attempt 1, sample, an evaluation, starts from ")


def test_a_plan_names_every_process_and_survives_a_round_trip(tmp_path: Path) -> None:
    plan = build_plan(config(ranks=2), tmp_path / "run", Attempt(number=3), gpus=0)
    assert [p.name for p in plan.processes] == ["orchestrator-0", "env-reverse_text-0", "env-reverse_text-1",
                                                "inference-0", "trainer-0", "trainer-1"]  # fmt: skip
    trainer = plan.process("trainer-1")
    assert trainer.command[1:] == ["-m", "prime_hpc.trainer", str(tmp_path / "run/plan.json"), "--process", "trainer-1"]
    assert trainer.log == str(tmp_path / "run/logs/attempt_3/trainer-1.log")
    assert plan.process("env-reverse_text-0").env["PRIME_HPC_SOURCE"] == "reverse_text"
    (tmp_path / "plan.json").write_bytes(plan.dump())
    assert load(tmp_path / "plan.json") == plan
    assert load(tmp_path / "plan.json").schema == PLAN_SCHEMA


def test_sft_has_trainer_ranks_only(tmp_path: Path) -> None:
    made = config(ranks=2)
    made.mode = "sft"
    assert [p.component for p in build_plan(made, tmp_path, Attempt(), gpus=0).processes] == ["trainer", "trainer"]


def test_a_plan_says_on_what_and_how_often_it_is_validated(tmp_path: Path) -> None:
    made = config()
    made.mode = "sft"
    for validation, said in (
        (SFTValidation(every=5, data=[SFTFile(path="/data/other.jsonl")]), "; validation on other.jsonl every 5 steps"),
        (SFTValidation(every=5, rows=9), "; validation on 9 rows held out every 5 steps"),
    ):
        made.trainer.sft.validation = validation
        console = Console(width=400, record=True)
        console.print(render(build_plan(made, tmp_path, Attempt(), gpus=0)))
        assert said in console.export_text()


@pytest.mark.parametrize(
    ("transport", "gpus", "expected"),
    [
        ("nccl", 1, "ipc or filesystem, since NCCL does not connect two processes on one GPU"),
        ("ipc", 2, "nccl or filesystem, since not every engine has one GPU, which a trainer rank shares"),
        ("ipc", 0, "nccl or filesystem, since not every engine has one GPU, which a trainer rank shares"),
        ("nccl", 2, None),
        ("nccl", 0, None),
        ("ipc", 1, None),
    ],
)
def test_weights_travel_only_where_they_can(tmp_path: Path, transport: str, gpus: int, expected: str | None) -> None:
    made = config()
    made.update.transport = transport
    if expected is None:
        build_plan(made, tmp_path, Attempt(), gpus=gpus)
        return
    with pytest.raises(ConfigurationError, match=f"update.transport = '{transport}': expected {expected}"):
        build_plan(made, tmp_path, Attempt(), gpus=gpus)


def test_nccl_needs_gpus_on_both_sides(tmp_path: Path) -> None:
    made = config(device="cpu")
    made.update.transport = "nccl"
    with pytest.raises(ConfigurationError, match="either the engines or the trainer have no GPU"):
        build_plan(made, tmp_path, Attempt(), gpus=1)


@pytest.mark.parametrize(
    ("gpus", "device", "adapters", "said"),
    [
        (0, "auto", False, "filesystem"),
        (1, "auto", False, "ipc"),
        (2, "auto", False, "nccl"),
        (2, "auto", True, "filesystem"),
        (2, "cpu", False, "filesystem"),
    ],
)
def test_weights_travel_from_memory_to_memory_between_gpus(
    tmp_path: Path, gpus: int, device: str, adapters: bool, said: str
) -> None:
    """And the plan says so."""
    made = config(device=device)
    if adapters:
        made.lora.rank, made.lora.serve = 8, "adapter"
    console = Console(width=400, record=True)
    console.print(render(build_plan(made, tmp_path, Attempt(), gpus=gpus)))
    assert f"; weights by {said}\n" in console.export_text().replace(" \n", "\n")


def test_frozen_models_have_engines_beside_those_of_the_policy() -> None:
    made = RunConfig(frozen={"big": FrozenModel(path="/big", replicas=2), "far": FrozenModel(base_url="http://a")})
    made.inference.gpus_per_replica, made.trainer.ranks = 2, 1
    plan = build_plan(made, Path("/runs/one"), Attempt(), 8)
    assert [p.name for p in plan.engines()] == ["inference-0"]
    assert [(p.name, p.gpus) for p in plan.serving("big")] == [("inference-1", [2, 3]), ("inference-2", [4, 5])]
    assert plan.serving("far") == []
    assert [p.gpus for p in plan.of("trainer")] == [[6]]
