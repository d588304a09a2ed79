"""Where everything of one sandbox lies: nodes, ports, addresses, files. Kept in `sandbox.json` so that another process
can find, use and stop it."""

import dataclasses
import os
import random
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prime_hpc.cluster.files import read_json, write_json
from prime_hpc.errors import InfrastructureFailure

Isolation = Literal["root", "user", "none"]

FIRST_PORT, PAST_PORTS = 10_000, 32_000  # below the ports that Linux gives to clients
PORT_ATTEMPTS = 100
LONGEST_SOCKET_PATH = 107  # bytes, sockaddr_un.sun_path of Linux without its final zero


@dataclass(frozen=True)
class Layout:
    """One sandbox. Nodes are `node0` ... ; all but `node0` have GPUs, so that a component without any has its node."""

    directory: Path
    nodes: int
    cpus: int
    gpus: int
    accounting: bool
    isolation: Isolation
    """How a node gets its own host name: UTS and mount namespaces, as root or in a user namespace; or not at all."""
    base_port: int

    @property
    def names(self) -> list[str]:
        return [f"node{index}" for index in range(self.nodes)]

    @property
    def gpu_names(self) -> list[str]:
        return self.names[1:] if self.gpus else []

    @property
    def conf(self) -> Path:
        return self.directory / "etc" / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.directory / "munge" / "socket"

    @property
    def database_socket(self) -> Path:
        return self.directory / "database" / "socket"

    @property
    def database_port(self) -> int:
        return self.base_port + 1

    def node_port(self, index: int) -> int:
        return self.base_port + 2 + index

    def node_address(self, index: int) -> str:
        """An address of the loopback network that no other sandbox of this machine has, as its base port is its own."""
        if self.isolation == "none":
            return "127.0.0.1"
        return f"127.{self.base_port // 256}.{self.base_port % 256}.{10 + index}"

    def log(self, daemon: str) -> Path:
        return self.directory / "log" / f"{daemon}.log"

    def early_log(self, daemon: str) -> Path:
        """What a daemon says before it opens its log."""
        return self.directory / "log" / f"{daemon}.err"

    def pid_file(self, daemon: str) -> Path:
        return self.directory / "run" / f"{daemon}.json"

    def save(self) -> None:
        record = {**dataclasses.asdict(self), "directory": str(self.directory)}
        write_json(self.directory / "sandbox.json", record)


def load(directory: Path) -> Layout:
    """The sandbox that was started in `directory`.

    Raises:
        InfrastructureFailure: none was.
    """
    record = read_json(directory / "sandbox.json")
    if record is None:
        raise InfrastructureFailure(f"{directory} holds no sandbox; start one with the verb `up`")
    return Layout(**{**record, "directory": Path(record["directory"])})


def check_socket_paths(layout: Layout) -> None:
    """Refuse a directory so deep that munged could not bind its socket there."""
    longest = f"{layout.munge_socket}.lock"
    if len(os.fsencode(longest)) > LONGEST_SOCKET_PATH:
        raise InfrastructureFailure(f"{layout.directory} is too deep for a Unix socket; choose a shorter path")


def free_ports(count: int) -> int:
    """The first of `count` consecutive TCP ports that nobody uses."""
    for _ in range(PORT_ATTEMPTS):
        first = random.randrange(FIRST_PORT, PAST_PORTS - count)
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise InfrastructureFailure(f"no {count} consecutive free ports between {FIRST_PORT} and {PAST_PORTS}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
