"""What a node has and lacks: every fault is planted and must be found."""

import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from prime_hpc.cluster import preflight
from prime_hpc.cluster.checks import fabric, filesystem
from prime_hpc.cluster.checks.cache import inspect_model
from prime_hpc.cluster.checks.fabric import Fabric, inspect_fabric
from prime_hpc.cluster.checks.filesystem import inspect_speed
from prime_hpc.cluster.checks.finding import Finding
from prime_hpc.cluster.checks.gpus import inspect_gpus
from prime_hpc.cluster.checks.meeting import Arrival
from prime_hpc.cluster.checks.network import inspect_ports
from tests.ranks import run_ranks

HEALTHY = """<gpu id="{i}"><fb_memory_usage><used>{used} MiB</used></fb_memory_usage><ecc_errors><volatile>
<dram_correctable>4</dram_correctable><dram_uncorrectable>{errors}</dram_uncorrectable></volatile></ecc_errors>
<clocks_event_reasons><clocks_event_reason_hw_slowdown>{slow}</clocks_event_reason_hw_slowdown></clocks_event_reasons>
</gpu>"""


def plant_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *gpus: str) -> None:
    """An nvidia-smi that shows these."""
    shim = tmp_path / "bin" / "nvidia-smi"
    shim.parent.mkdir()
    (tmp_path / "answer").write_text(f"<nvidia_smi_log>{''.join(gpus)}</nvidia_smi_log>")
    shim.write_text(f"#!/bin/sh\ncat {tmp_path / 'answer'}\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{shim.parent}:{os.environ['PATH']}")


def gpu(i: int = 0, used: int = 3, errors: int = 0, slow: str = "Not Active") -> str:
    return HEALTHY.format(i=i, used=used, errors=errors, slow=slow)


@pytest.mark.parametrize(("second", "wanted", "words"), [
    (gpu(1), 2, None),
    (gpu(1), 4, "2 of 4 GPUs"),
    (gpu(1, used=70_000), 2, "GPU 1: 70000 MiB in use already: end the process that left it, or take another node"),
    (gpu(1, errors=2), 2, "GPU 1: 2 uncorrected memory errors: take another node and tell its keepers"),
    (gpu(1, slow="Active"), 2, "GPU 1: the hardware holds its clocks down (heat or power)"),
    ("<gpu><fb_memory_usage><used>GPU is lost</used></fb_memory_usage></gpu>", 2, "GPU 1: does not answer"),
])  # fmt: skip
def test_faults_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second, wanted, words) -> None:
    plant_gpus(tmp_path, monkeypatch, gpu(0), second)
    assert inspect_gpus(wanted, tmp_path) == Finding("GPUs", words is None, words or "2 GPUs")


def test_a_dead_device_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_gpus(tmp_path, monkeypatch, gpu(0))
    socket.socket(socket.AF_UNIX).bind(str(tmp_path / "nvidia0"))
    (tmp_path / "nvidiactl").touch()
    found = inspect_gpus(1, tmp_path)
    assert not found.fit and found.words == f"{tmp_path}/nvidia0 is dead (No such device or address)"


def test_a_node_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert inspect_gpus(0) == Finding("GPUs", True, "no GPU")
    assert inspect_gpus(8) == Finding("GPUs", False, "no GPU; 8 are needed")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert inspect_gpus(2) == Finding("GPUs", True, "2 GPUs, not examined: no nvidia-smi")
    assert inspect_fabric(Fabric(tmp_path, 1, 0, 1), 0, 100.0) == Finding("fabric", True, "one node")
    assert inspect_fabric(Fabric(tmp_path, 1, 1, 1), 0, 100.0) == Finding("fabric", True, "one GPU")


def test_a_slow_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flush takes as long as on a server that writes 16 MiB a second."""
    assert inspect_speed(tmp_path, 0.0, 2**24).fit
    clock = [0.0]
    monkeypatch.setattr(filesystem.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(filesystem.os, "fsync", lambda _: clock.__setitem__(0, clock[0] + 1.0))
    monkeypatch.setattr(filesystem, "_read", lambda _: 0.001)
    found = inspect_speed(tmp_path, 0.1, 2**24)
    assert not found.fit and found.words.startswith("0.02 GB/s written") and "at least 0.1 are needed" in found.words
    assert list(tmp_path.iterdir()) == []


def test_a_busy_port() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert inspect_ports([port]) == Finding("ports", False, f"port {port} is taken (Address already in use)")
    assert inspect_ports([]).fit


def test_a_cache_that_is_not_whole(tmp_path: Path, tiny_model: Path) -> None:
    assert inspect_model(tiny_model) == Finding("model", True, f"{tiny_model.name} is whole")
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 12)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}})
    )
    size = 8 + len(header)
    assert inspect_model(tmp_path).words == (
        f"no config.json; no tokenizer; a.safetensors has {size + 12} of {size + 16} bytes; and 1 more in {tmp_path}: "
        "run python -m tools.prefetch where there is a network")  # fmt: skip


def run_preflight(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = preflight.main([str(folder), "--probe-mib", "8", *words])
    return code, capsys.readouterr().out


def test_a_fit_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = run_preflight(tmp_path, capsys, "--module", "json")
    assert code == 0 and shown.endswith("verdict: all 1 nodes are fit\n")


def test_everything_that_is_missing_is_in_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = run_preflight(tmp_path, capsys, "--module", "no_such_module", "--free-gib", "1e9", "--nodes", "2",
                                "--timeout-s", "0")  # fmt: skip
    host, [said] = socket.gethostname(), [line for line in shown.splitlines() if line.startswith("  ") and ":" in line]
    assert code == 1 and f"verdict: not fit; leave out with --exclude={host}" in shown
    assert f"shared folder: 1 of 2 nodes write to the same {tmp_path}" in said
    assert "packages: no module no_such_module" in said
    assert f"of 1000000000 GiB free in {tmp_path}" in said
    assert "1 nodes handed in no report" in shown
    assert list(tmp_path.iterdir()) == []


def test_a_node_without_the_folder_is_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = run_preflight(tmp_path / "absent", capsys, "--timeout-s", "0")
    assert code == 1 and f"shared folder: no folder {tmp_path}/absent" in shown
    assert not (tmp_path / "absent").exists()


def test_beside_a_run_at_work_gpus_may_be_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_gpus(tmp_path, monkeypatch, gpu(0, used=70_000))
    assert not inspect_gpus(1, tmp_path).fit
    assert inspect_gpus(1, tmp_path, in_use=True).fit


def test_a_skewed_clock_is_that_of_the_node_that_has_it(tmp_path: Path) -> None:
    """Two other nodes agree with the file server; this one is 30 s ahead of it."""
    folder = tmp_path / ".preflight_0_0"
    folder.mkdir()
    for host in ("a", "b"):
        (folder / f"{host}.arrival").write_bytes(msgspec.json.encode(Arrival(host, 0.0)))
    ahead = "import time; now = time.time; time.time = lambda: now() + 30; "
    program = f"{ahead}import sys; from prime_hpc.cluster import preflight; sys.exit(preflight.main())"
    command = [sys.executable, "-c", program, str(tmp_path), "--nodes", "3", "--probe-mib", "8", "--timeout-s", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "clock: +30.0" in done.stdout and "from the others': set it (chrony, ntp)" in done.stdout


def measure_as_a_node(node: int, whole: Fabric) -> None:
    fabric.measure(0, whole, node, whole.folder / f"{node}.fabric")


def test_the_fabric_is_measured_within_the_trainer_and_from_there_to_the_others(tmp_path: Path) -> None:
    """Three nodes without GPUs, the last two of them the trainer's."""
    run_ranks(3, measure_as_a_node, Fabric(tmp_path, nodes=3, gpus=0, trainers=2))
    speeds = [json.loads((tmp_path / f"{node}.fabric").read_text()) for node in range(3)]
    assert [set(found) for found in speeds] == [
        {"trainer to node 0"}, {"all-reduce", "trainer to node 0"}, {"all-reduce"}]  # fmt: skip
    assert all(speed > 0 for found in speeds for speed in found.values())


def test_who_sends_to_whom_in_the_fabric(tmp_path: Path) -> None:
    assert Fabric(tmp_path, nodes=4, gpus=8, trainers=2).receivers() == {"trainer to node 0": 0, "trainer to node 1": 8}
    assert Fabric(tmp_path, nodes=4, gpus=8, trainers=4).receivers() == {"node to node 3": 24}
    assert Fabric(tmp_path, nodes=1, gpus=8, trainers=1).receivers() == {}
