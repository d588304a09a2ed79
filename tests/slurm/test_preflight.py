"""The preflight as a job step over several nodes, with faults planted on all but one of them."""

import shutil
import socket
import sys
from pathlib import Path

import pytest

from tests.integration.runs import REPOSITORY
from tools.slurm_sandbox import SlurmSandbox

pytestmark = pytest.mark.slurm

NODE = """#!/bin/bash
mkdir -p $FOLDER/bin/$SLURMD_NODENAME
gpu='<gpu><fb_memory_usage><used>3 MiB</used></fb_memory_usage></gpu>'
printf '#!/bin/sh\\necho "<log>%s</log>"\\n' "$gpu$gpu" > $FOLDER/bin/$SLURMD_NODENAME/nvidia-smi
chmod +x $FOLDER/bin/$SLURMD_NODENAME/nvidia-smi
export PATH=$FOLDER/bin/$SLURMD_NODENAME:$PATH
port=$FREE; [ $SLURMD_NODENAME = node4 ] && port=$BUSY
cd {repository}
exec {python} $FOLDER/faulty.py $FOLDER/shared --gpus $GPUS --probe-mib 8 --disk-gb-s 1e-5 --timeout-s 300 \\
    --model $FOLDER/models/$SLURMD_NODENAME --port $port $MORE
"""
FAULTY = """import os, sys, time
from pathlib import Path
from prime_hpc.cluster import preflight
from prime_hpc.cluster.checks import filesystem, gpus

node, now, write = os.environ["SLURMD_NODENAME"], time.time, filesystem._write
gpus.inspect_gpus.__defaults__ = (Path(os.environ["FOLDER"]) / "devices" / node,)
if node == "node2":
    time.time = lambda: now() + 30
if node == "node3":  # a file system that writes 8 MiB in an hour, by the clock
    filesystem._write = lambda *given: write(*given) + 3600

if __name__ == "__main__":
    sys.exit(preflight.main())
"""


def plant(folder: Path, model: Path) -> None:
    """What the nodes are given: devices, and a model of their own each."""
    (folder / "shared").mkdir()
    (folder / "faulty.py").write_text(FAULTY)
    script = folder / "node.sh"
    script.write_text(NODE.replace("{repository}", str(REPOSITORY)).replace("{python}", sys.executable))
    script.chmod(0o755)
    for node in range(5):
        (folder / "devices" / f"node{node}").mkdir(parents=True)
        shutil.copytree(model, folder / "models" / f"node{node}")


def check(slurm: SlurmSandbox, folder: Path, nodes: str, **variables: object) -> tuple[int, str]:
    """Exit code and table of the preflight on these nodes."""
    given = ",".join(f"{name}={value}" for name, value in {"FOLDER": folder, "MORE": "", **variables}.items())
    count = len(nodes.split(","))
    step = ["srun", "--partition=all", f"--nodelist={nodes}", f"--nodes={count}", "--ntasks-per-node=1", "--input=none",
            f"--export=ALL,PYTHONPATH={REPOSITORY},{given}", str(folder / "node.sh")]  # fmt: skip
    shown = slurm.run(step, check=False)
    return shown.returncode, shown.stdout + shown.stderr


def test_one_table_and_one_verdict_name_the_nodes_to_leave_out(
    slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, tiny_model)
    monkeypatch.chdir(tmp_path / "devices" / "node1")  # names of sockets are short
    socket.socket(socket.AF_UNIX).bind("nvidia0")
    (tmp_path / "models" / "node4" / "model.safetensors").unlink()
    with socket.create_server(("", 0)) as busy, socket.create_server(("", 0)) as other:
        free, taken = other.getsockname()[1], busy.getsockname()[1]
        other.close()
        code, shown = check(slurm, tmp_path, "node0,node1,node2,node3,node4", GPUS=2, FREE=free, BUSY=taken,
                            MORE="--fabric-gb-s 1")  # fmt: skip
    assert code != 0
    assert "verdict: not fit; leave out with --exclude=node1,node2,node3,node4" in shown, shown
    faults = [line.strip() for line in shown.splitlines() if line.startswith("  node")]
    assert faults[0] == f"node1: GPUs: {tmp_path}/devices/node1/nvidia0 is dead (No such device or address)"
    assert faults[1].startswith("node2: clock: +30.0")
    assert faults[2].startswith("node3: filesystem: 0.00 GB/s written")
    assert faults[3].startswith(f"node4: ports: port {taken} is taken (Address already in use); model: no model.safe")
    assert "fabric" not in shown


def test_the_speed_between_nodes_is_held_against_a_floor(slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path) -> None:
    """Over gloo, since the sandbox's nodes have no GPUs; the last of two nodes is the trainer's."""
    plant(tmp_path, tiny_model)
    code, shown = check(slurm, tmp_path, "node0,node1", GPUS=0, FREE=0, BUSY=0,
                        MORE="--disk-gb-s 0 --trainer-nodes 1 --fabric-gb-s 1e6")  # fmt: skip
    assert code != 0
    assert "leave out with --exclude=node0,node1" in shown, shown
    assert "fabric: trainer to node 0" in shown and "at least 1e+06 are needed" in shown
