"""Mistakes in what is asked of Slurm are named before anything is submitted."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from prime_hpc.config.checks import find_conflicts
from prime_hpc.config.cluster import component
from prime_hpc.config.compose import compose_run
from prime_hpc.config.model_checks import find_unchecked
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import parse
from prime_hpc.config.slurm_checks import find_slurm_conflicts, parse_time

HETJOB = ("launcher.name=slurm_hetjob", "cluster.gpus_per_node=8", "trainer.ranks=8")
ORCHESTRATOR, INFERENCE, TRAINER = (f"cluster.components.{c}" for c in ("orchestrator", "inference", "trainer"))

CASES = {
    "gpus unknown": (["cluster.gpus_per_node=null"], [
        f"{INFERENCE}.gpus_per_node = None: expected GPUs of a node, here or as cluster.gpus_per_node; 0 for none",
        f"{TRAINER}.gpus_per_node = None: expected GPUs of a node, here or as cluster.gpus_per_node; 0 for none"]),
    "gpus of the orchestrator": (["cluster.components.orchestrator.gpus_per_node=1"], [
        "cluster.components.orchestrator.gpus_per_node = 1: expected to be left out: neither orchestrator nor "
        "environments use a GPU"]),
    "a trainer without gpus": (["cluster.gpus_per_node=0", "trainer.device=cuda"], [
        "trainer.device = 'cuda': expected nodes with GPUs; cluster.gpus_per_node is 0"]),
    "orchestrators": (["cluster.components.orchestrator.nodes=2"], [
        "cluster.components.orchestrator.nodes = 2: expected 1"]),
    "time": (["cluster.time=1day"], [
        "cluster.time = '1day': expected a time limit as Slurm writes it: 'MM', 'HH:MM:SS' or 'D-HH:MM:SS'"]),
    "signal": (["cluster.time='00:05:00'"], [
        "cluster.signal_s = 300: expected less than cluster.time = '00:05:00', which is 300 s"]),
    "memory": (["cluster.memory=500GB"], [
        f"{key}.memory = '500GB': expected a number with K, M, G or T, e.g. 500G; 0 for all of a node"
        for key in (ORCHESTRATOR, INFERENCE, TRAINER)]),
    "gres": ([f"{TRAINER}.gres=gpu:h200:8"], [
        f"{TRAINER}.gres = 'gpu:h200:8': expected `gpu` or `gpu:TYPE`; the count is made from gpus_per_node"]),
    "directives": ([f"{TRAINER}.directives={{nodes: 3, output: x, --nice: 1}}"], [
        f"{TRAINER}.directives.nodes = 3: expected to be left out: set {TRAINER}.nodes",
        f"{TRAINER}.directives.output = 'x': expected to be left out: it follows from the run and from keys of "
        "`cluster`",
        f"{TRAINER}.directives.--nice = 1: expected a long option of sbatch without dashes in front, e.g. mail-type"]),
    "image": ([f"{TRAINER}.container.runtime=pyxis"], [
        f"{TRAINER}.container.image = None: expected an image, since {TRAINER}.container.runtime is pyxis"]),
    "runtime": ([f"{TRAINER}.container.image=a.sif", f"{TRAINER}.container.mounts=[data]"], [
        f"{TRAINER}.container.runtime = None: expected apptainer or pyxis, since there is an image",
        f"{TRAINER}.container.mounts = 'data': expected absolute folders as OUTSIDE:INSIDE"]),
    "shared gpus": (["trainer.share_gpu=true"], [
        "trainer.share_gpu = True: expected false, since components have nodes of their own; only "
        "launcher=slurm_single with enough GPUs in one node can share"]),
    "one node for two": ([f"{INFERENCE}.directives={{nodelist: n1}}", f"{TRAINER}.directives={{nodelist: n1}}"], [
        f"{TRAINER}.directives.nodelist = 'n1': expected other nodes than inference: groups of a job share none"]),
    "uneven ranks": (["trainer.ranks=12", f"{TRAINER}.nodes=8"], [
        "trainer.ranks = 12: expected the same number of ranks on each of 8 nodes of at most 8 ranks"]),
    "too many ranks": (["trainer.ranks=32", f"{TRAINER}.nodes=2"], [
        "trainer.ranks = 32: expected the same number of ranks on each of 2 nodes of at most 8 ranks"]),
    "too few nodes": (["inference.replicas=24", f"{INFERENCE}.nodes=2"], [
        f"{INFERENCE}.nodes = 2: expected nodes for 24 engines of 1 GPUs, at most one each, with at most 8 GPUs"]),
    "too many nodes": ([f"{INFERENCE}.nodes=2"], [
        f"{INFERENCE}.nodes = 2: expected nodes for 1 engines of 1 GPUs, at most one each, with at most 8 GPUs"]),
    "an engine on several nodes": (["inference.gpus_per_replica=16", "update.transport=delta"], [
        "update.transport = 'delta': expected filesystem or nccl: engines on several nodes have no common memory for a "
        "copy of the weights"]),
    "odd engine": (["inference.gpus_per_replica=12"], [
        "inference.gpus_per_replica = 12: expected a multiple of the 8 GPUs of a node, since it is more than one has"]),
    "nodes of large engines": (["inference.gpus_per_replica=16", f"{INFERENCE}.nodes=3"], [
        f"{INFERENCE}.nodes = 3: expected 2: 1 engines of 16 GPUs on nodes of 8"]),
    "handed on": (["cluster.components.orchestrator.memory=8G", f"{INFERENCE}.memory='0'"], [
        f"{TRAINER}.memory = None: expected a value, since Slurm would hand on that of orchestrator"]),
    "spare": ([f"{INFERENCE}.spare_nodes=1"], [
        f"{key}.spare_nodes = 0: expected at least 1: Slurm keeps a job only if each group could lose a node"
        for key in (ORCHESTRATOR, TRAINER)]),
    "nodes of two kinds": (["launcher.name=slurm_single", f"{INFERENCE}.gpus_per_node=4"], [
        f"{INFERENCE}.gpus_per_node = 4: expected 8 as for the trainer: slurm_single has nodes of one kind"]),
}  # fmt: skip


def make_config(*arguments: str) -> RunConfig:
    """A configuration of keys and values, later ones winning."""
    return parse(OmegaConf.to_container(OmegaConf.from_dotlist(list(arguments))))


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_named_with_what_was_expected(case: str) -> None:
    arguments, problems = CASES[case]
    assert [str(p) for p in find_slurm_conflicts(make_config(*HETJOB, *arguments))] == problems


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [f"{ORCHESTRATOR}.spare_nodes=1", f"{INFERENCE}.spare_nodes=1", "trainer.ranks=16"],
        ["launcher.name=slurm_linked", f"{ORCHESTRATOR}.memory=8G", f"{TRAINER}.memory=1G"],
        ["launcher.name=slurm_single", "inference.replicas=8", "trainer.share_gpu=true"],
        ["launcher.name=dry_run", "launcher.target=slurm_hetjob", "inference.gpus_per_replica=32"],
        ["mode=serve", "inference.replicas=16"],
    ],
)
def test_what_slurm_would_take_is_not_refused(arguments: list[str]) -> None:
    assert list(find_slurm_conflicts(make_config(*HETJOB, *arguments))) == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("90:30", 5430), ("24:00:00", 86400), ("2-12", 216000), ("1-00:30", 88200), ("1-00:00:05", 86405),
     ("1d", None), ("", None), ("10:75", None)],
)  # fmt: skip
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: int | None) -> None:
    assert parse_time(text) == seconds


def test_a_component_takes_from_the_cluster_what_it_leaves_out() -> None:
    config = parse({"cluster": {
        "partition": "gpu", "gpus_per_node": 8, "directives": {"exclusive": True, "nice": 1},
        "container": {"runtime": "pyxis", "image": "all.sqsh"},
        "components": {"inference": {"partition": "l40", "nodes": 2, "directives": {"nice": 5},
                                     "container": {"image": "vllm.sqsh"}}}}})  # fmt: skip
    inference, trainer = component(config.cluster, "inference"), component(config.cluster, "trainer")
    assert (inference.partition, inference.gpus_per_node, inference.nodes) == ("l40", 8, 2)
    assert inference.directives == {"exclusive": True, "nice": 5}
    assert (inference.container.runtime, inference.container.image) == ("pyxis", "vllm.sqsh")
    assert (trainer.partition, trainer.nodes, trainer.container.image) == ("gpu", None, "all.sqsh")


def test_a_dry_run_for_slurm_needs_no_model_and_says_what_it_left_out() -> None:
    dry = compose_run(["+experiment=glm5_swe", "launcher=dry_run", "model.path=/absent"])
    assert find_conflicts(dry) == []
    assert find_unchecked(dry) == [
        "/absent/config.json is not here: memory, disk, pace and cost are not estimated, and seq_len was not checked; "
        "submitting checks it",
        "/absent/tokenizer_config.json is not here: tokenizer and chat template were not checked; submitting checks it",
        "/absent/model.safetensors is not here: files of weights were not looked for; submitting checks it",
    ]
    unnamed = compose_run(["+experiment=glm5_swe", "launcher=dry_run"])
    assert [p.key for p in find_conflicts(unnamed)] == ["model.path"]
    submitted = compose_run(["+experiment=glm5_swe", "model.path=/absent", "inference.engine=mine"])
    assert [p.key for p in find_conflicts(submitted)] == ["model.path"]


def test_a_dry_run_for_slurm_checks_a_config_that_is_there(tiny_model: Path) -> None:
    config = compose_run(["+experiment=glm5_swe", "launcher=dry_run", f"model.path={tiny_model}"])
    assert [p.key for p in find_conflicts(config)] == ["seq_len"]
    assert find_unchecked(config) == []
