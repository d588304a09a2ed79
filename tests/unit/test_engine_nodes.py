"""How the nodes of one engine find one another."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from prime_hpc.cluster.rendezvous import Rendezvous
from prime_hpc.errors import DeadlineExceeded
from prime_hpc.inference import nodes
from prime_hpc.plan.run_plan import ProcessPlan


def role(directory: Path, count: int, rank: int, timeout_s: float = 60.0) -> SimpleNamespace:
    """The process of rank `rank` of an engine on `count` nodes, which are all this machine; engine 1 is another one."""
    names = ["inference-0", *(f"inference-0-node-{i}" for i in range(1, count))]
    processes = [ProcessPlan(name=name, component="inference", index=0, node=0, rank=i, command=[], log="")
                 for i, name in enumerate(names)]  # fmt: skip
    other = ProcessPlan(name="inference-1", component="inference", index=1, node=0, command=[], log="")
    return SimpleNamespace(
        process=processes[rank],
        plan=SimpleNamespace(nodes=1, of=lambda component: [*processes, other]),
        bind_host="127.0.0.1",
        rendezvous=Rendezvous(directory, names[rank], 1),
        heart=SimpleNamespace(waiting=lambda *_: nullcontext()),
        config=SimpleNamespace(cluster=SimpleNamespace(start_timeout_s=timeout_s)),
    )


def test_an_engine_on_one_node_meets_nobody(tmp_path: Path) -> None:
    assert nodes.meeting(role(tmp_path, 1, 0)) == {}
    assert list(tmp_path.iterdir()) == []


def test_the_first_node_says_where_and_the_others_come_there(tmp_path: Path) -> None:
    first, *others = [nodes.meeting(role(tmp_path, 3, rank)) for rank in range(3)]
    ports = {key: first[key] for key in ("master_port", "data_parallel_rpc_port")}
    assert len({*ports.values()}) == 2 and min(ports.values()) > 1023
    assert first == {"master_addr": "127.0.0.1", **ports, "nnodes": 3, "node_rank": 0}
    assert others == [first | {"node_rank": rank, "headless": True} for rank in (1, 2)]


def test_a_node_does_not_wait_for_the_first_for_ever(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="inference-0-node-1 waited 0 s for meeting from inference-0"):
        nodes.meeting(role(tmp_path, 2, 1, timeout_s=0.1))
