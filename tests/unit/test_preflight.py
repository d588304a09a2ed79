"""What a node has and lacks."""

from pathlib import Path

from prime_hpc.cluster.files import write_json
from prime_hpc.cluster.preflight import inspect_node, parse_arguments


def test_a_fit_node_lacks_nothing(tmp_path: Path) -> None:
    has, lacks = inspect_node(parse_arguments([str(tmp_path), "--module", "json"], {}), "7_0")
    assert lacks == []
    assert "1 nodes met" in has
    assert list(tmp_path.iterdir()) == []


def test_everything_that_is_missing_is_named(tmp_path: Path) -> None:
    words = [str(tmp_path), "--gpus", "9999", "--module", "no_such_module", "--free-gib", "1e9", "--timeout-s", "0"]
    gpus, module, space, nodes = inspect_node(parse_arguments(words, {"SLURM_STEP_NUM_NODES": "2"}), "7_0")[1]
    assert gpus.endswith(" of 9999 GPUs")
    assert module == "no module no_such_module"
    assert space.endswith(f" of 1000000000 GiB free in {tmp_path}")
    assert nodes == f"1 of 2 nodes write to the same {tmp_path}"
    assert list(tmp_path.iterdir()) == []


def test_a_node_without_the_folder_is_not_fit(tmp_path: Path) -> None:
    assert inspect_node(parse_arguments([str(tmp_path / "absent")], {}), "7_0")[1] == [f"no folder {tmp_path}/absent"]


def test_nodes_meet_through_the_folder_and_the_last_removes_it(tmp_path: Path) -> None:
    wanted, folder = parse_arguments([str(tmp_path), "--nodes", "2"], {}), tmp_path / ".preflight_7_1"
    write_json(folder / "other.here", {})
    assert inspect_node(wanted, "7_1")[1] == []
    assert "other.here" in {path.name for path in folder.iterdir()}, "the other node has not seen this one yet"
    write_json(folder / "other.met", {})
    assert inspect_node(wanted, "7_1")[1] == []
    assert list(tmp_path.iterdir()) == []
