"""Can processes of this node listen, and be reached by the name that they would publish?"""

import os
import socket

from prime_hpc.cluster.checks.finding import Finding

CONNECT_S = 5.0


def inspect_ports(ports: list[int]) -> Finding:
    """A port of the system's choice answers under the node's own name, and each of `ports` is free."""
    faults = [fault for fault in (_own_name(), *(_busy(port) for port in ports)) if fault]
    return Finding("ports", not faults, "; ".join(faults) or f"{socket.gethostname()} answers")


def _own_name() -> str | None:
    host = socket.gethostname()
    with socket.create_server(("", 0)) as server:
        try:
            socket.create_connection((host, server.getsockname()[1]), CONNECT_S).close()
        except OSError as error:
            return f"this node cannot be reached as {host} ({error}): look at its /etc/hosts and firewall"
    return None


def _busy(port: int) -> str | None:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return f"port {port} is taken ({os.strerror(error.errno or 0)})"
    return None
