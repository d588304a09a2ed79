"""A plan against what sinfo says of a cluster."""

import os
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config.schema import parse
from prime_hpc.launchers.slurm.site import Nodes, Partition, ask_starts, find_site_problems, read_partitions
from prime_hpc.plan.build import Attempt, build_plan
from prime_hpc.plan.run_plan import RunPlan

SINFO = """\
cpu*|infinite|4|64|256000|(null)|(null)
gpu|1-00:00:00|16|96+|1000000|gpu:h100:8(S:0-1),nvme:1|h100,fast
gpu|1-00:00:00|2|96|2000000|gpu:h200:4(S:0),gpu:h100:4(S:1)|h200
"""


def make_plan(cluster: dict[str, Any], components: dict[str, Any] | None = None) -> RunPlan:
    gpu = {"partition": "gpu", "gpus_per_node": 8}
    parts = {"inference": gpu, "trainer": {**gpu, "nodes": 2}, **(components or {})}
    config = parse({"launcher": {"name": "slurm_hetjob"}, "cluster": {**cluster, "components": parts}})
    return build_plan(config, Path("/runs/mine"), Attempt(), gpus=0)


def problems(cluster: dict[str, Any], **components: Any) -> list[str]:
    return [str(p) for p in find_site_problems(make_plan(cluster, components), read_partitions(SINFO))]


def test_sinfo_is_read() -> None:
    cpu, gpu = read_partitions(SINFO)
    assert cpu == Partition("cpu", True, None, [Nodes(4, 64, 256000, 0, frozenset({"(null)"}))])
    assert (gpu.name, gpu.default, gpu.limit_s) == ("gpu", False, 86400)
    assert [(nodes.count, nodes.cpus, nodes.gpus) for nodes in gpu.nodes] == [(16, 96, 8), (2, 96, 8)]


def test_a_plan_that_fits_has_no_problem() -> None:
    assert problems({"time": "1-00:00:00", "cpus": 64, "memory": "200G"}) == []


@pytest.mark.parametrize(("cluster", "components", "expected"), [
    ({}, {"trainer": {"partition": "gpus", "gpus_per_node": 8}},
     "cluster.components.trainer.partition = 'gpus': expected one of cpu, gpu; did you mean 'gpu'?"),
    ({"time": "2-00:00:00"}, {}, "cluster.time = '2-00:00:00': expected at most 86400 s, the limit of gpu"),
    ({}, {"trainer": {"partition": "gpu", "gpus_per_node": 16}},
     "cluster.components.trainer.gpus_per_node = 16: expected what 1 of the nodes of gpu have; none do"),
    ({}, {"trainer": {"partition": "gpu", "gpus_per_node": 8, "nodes": 20}},
     "cluster.components.trainer.nodes = 20: expected at most the 18 nodes of gpu"),
    ({}, {"trainer": {"partition": "gpu", "gpus_per_node": 8, "nodes": 3, "constraint": "h200"}},
     "cluster.components.trainer.constraint = 'h200': expected what 3 of the nodes of gpu have; 2 do"),
    ({}, {"orchestrator": {"cpus": 65}},
     "cluster.components.orchestrator.cpus = 65: expected what 1 of the nodes of cpu have; none do"),
    ({}, {"orchestrator": {"memory": "1T"}},
     "cluster.components.orchestrator.memory = '1T': expected what 1 of the nodes of cpu have; none do"),
])  # fmt: skip
def test_what_the_cluster_lacks_is_named(cluster, components, expected) -> None:
    assert expected in problems(cluster, **components)


SBATCH = r"""#!/bin/bash
script=$(cat)
hours=3  # on partition gpu, with the whole time limit
[[ $script == *--time=720* ]] && hours=2
[[ $script == *--time=360* ]] && hours=4
[[ $script == *--partition=spot* ]] && hours=1
echo "sbatch: Job 7 to start at $(date -d "+$hours hours" +%Y-%m-%dT%H:%M:%S) using 64 processors" >&2
"""


def test_what_would_start_sooner_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a shorter limit that starts later, nor a partition whose nodes have no GPUs."""
    (tmp_path / "sbatch").write_text(SBATCH)
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    spot = "spot|1-00:00:00|20|96|2000000|gpu:h100:8|h100\n"
    starts = ask_starts(make_plan({"time": "1-00:00:00"}), read_partitions(SINFO + spot))
    assert [(start.limit, start.partition) for start in starts] == [
        ("1-00:00:00", None), ("720", None), ("1-00:00:00", "spot")]  # fmt: skip
    hours = [(start.at - starts[0].at).total_seconds() / 3600 for start in starts]
    assert hours == pytest.approx([0, -1, -2], abs=0.1)
