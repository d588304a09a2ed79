"""An engine on several nodes: the first one answers requests, the others compute for it."""

import threading
import time
from argparse import Namespace
from typing import Any

from prime_hpc.cluster.role import Role
from prime_hpc.errors import InferenceFailure
from prime_hpc.inference.server import free_port

MEETING = "meeting"
PROGRESS_S = 5.0


def meeting(role: Role) -> dict[str, Any]:
    """vLLM's arguments by which the nodes of an engine find one another; none for an engine on one node.

    The first node picks address and ports and publishes them for the others. vLLM itself binds the ports, so that they
    are only known to have been free a moment ago.

    Raises:
        DeadlineExceeded: the first node does not come.
    """
    nodes = [process for process in role.plan.of("inference") if process.index == role.process.index]
    if len(nodes) == 1:
        return {}
    own = {"nnodes": len(nodes), "node_rank": role.process.rank}
    if role.process.rank == 0:
        place = _meeting_place(role)
        role.rendezvous.publish("starting", **{MEETING: place})
        return {**place, **own}
    head, timeout_s = nodes[0].name, role.config.cluster.start_timeout_s
    with role.heart.waiting(f"the {MEETING} place", head, timeout_s):
        place = role.rendezvous.wait(head, MEETING, timeout_s)
    return {**place, **own, "headless": True}


def compute(role: Role, args: Namespace) -> None:
    """Run the workers of a node that answers no requests, until SIGTERM.

    Raises:
        InferenceFailure: they ended by themselves.
    """
    from prime_hpc.inference import adapter

    role.rendezvous.publish("computing")
    threading.Thread(target=_report, args=[role], name="report", daemon=True).start()
    adapter.run_headless(args)
    raise InferenceFailure("the workers of this node have ended; their last lines are in this log")


def _meeting_place(role: Role) -> dict[str, Any]:
    host = role.bind_host if role.plan.nodes == 1 else _address()
    return {"master_addr": host, "master_port": free_port(host), "data_parallel_rpc_port": free_port(host)}


def _address() -> str:
    """This node's, as vLLM finds it: the one of VLLM_HOST_IP, or of the interface that leads out."""
    from prime_hpc.inference import adapter

    return adapter.get_ip()


def _report(role: Role) -> None:
    """Whether these workers get on is seen by the first node, which has the requests."""
    while True:
        role.heart.progress("computing for the first node")
        time.sleep(PROGRESS_S)
