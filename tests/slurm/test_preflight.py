"""The preflight as a job step over several nodes, with faults planted on two of them."""

import sys
from pathlib import Path

import pytest

from tests.integration.runs import REPOSITORY
from tools.slurm_sandbox import SlurmSandbox

pytestmark = pytest.mark.slurm

NODE = """#!/bin/bash
mkdir -p $FOLDER/bin/$SLURMD_NODENAME
count=2; [ $SLURMD_NODENAME = node1 ] && count=1
gpu='<gpu><fb_memory_usage><used>3 MiB</used></fb_memory_usage></gpu>'
printf '#!/bin/sh\\necho "<log>%s</log>"\\n' "$(for i in $(seq $count); do echo -n "$gpu"; done)" \\
    > $FOLDER/bin/$SLURMD_NODENAME/nvidia-smi
chmod +x $FOLDER/bin/$SLURMD_NODENAME/nvidia-smi
ahead=0; [ $SLURMD_NODENAME = node2 ] && ahead=30
cd {repository}
export PATH=$FOLDER/bin/$SLURMD_NODENAME:$PATH
exec {python} -c "import time; now = time.time; time.time = lambda: now() + $ahead
import sys; from prime_hpc.cluster import preflight; sys.exit(preflight.main())" $FOLDER --gpus 2 --probe-mib 8
"""


def test_one_table_and_one_verdict_name_the_nodes_to_leave_out(slurm: SlurmSandbox, tmp_path: Path) -> None:
    script = tmp_path / "node.sh"
    script.write_text(NODE.replace("{repository}", str(REPOSITORY)).replace("{python}", sys.executable))
    script.chmod(0o755)
    step = ["srun", "--partition=gpu", "--nodes=4", "--ntasks-per-node=1", "--input=none",
            f"--export=ALL,FOLDER={tmp_path}", str(script)]  # fmt: skip
    shown = slurm.run(step, check=False)
    assert shown.returncode != 0
    assert "verdict: not fit; leave out with --exclude=node1,node2" in shown.stdout, shown.stdout + shown.stderr
    faults = [line.strip() for line in shown.stdout.splitlines() if line.startswith("  node")]
    assert faults[0] == "node1: GPUs: 1 of 2 GPUs"
    assert faults[1].startswith("node2: clock: +30.0")
