"""All nodes of a step at one folder: do they see each other's files, do their clocks agree, and what did each find?"""

import os
import shutil
import socket
import time
from pathlib import Path

import msgspec

from prime_hpc.cluster.checks.finding import Finding
from prime_hpc.cluster.files import list_fresh, write_atomic

POLL_S = 0.2


class Arrival(msgspec.Struct, frozen=True):
    """A node came: its name, and its clock less that of the file server at the same moment, in seconds."""

    host: str
    ahead_s: float


class Report(msgspec.Struct, frozen=True):
    """Everything that a node has found."""

    host: str
    findings: list[Finding]


def node_name() -> str:
    """The node's name, as Slurm has it where it runs this task."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


class Meeting:
    """`nodes` nodes in `folder`, each of which waits for the others' files for `timeout_s` seconds at most."""

    def __init__(self, folder: Path, nodes: int, timeout_s: float):
        self.folder, self._nodes, self._timeout_s = folder, nodes, timeout_s
        self._host = node_name()

    def attend(self, skew_s: float) -> list[Finding]:
        """Leave a file and wait for those of the others: who sees whom, and whose clock is off by more than `skew_s`.

        A file's time of change comes from the server, so that clocks are compared with one and the same.
        """
        begin, stamp = time.monotonic(), self.folder / f"{self._host}.stamp"
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
        arrival = Arrival(self._host, time.time() - stamp.stat().st_mtime)
        write_atomic(self.folder / f"{self._host}.arrival", msgspec.json.encode(arrival))
        names = self._wait(".arrival")
        arrivals = [msgspec.json.decode((self.folder / name).read_bytes(), type=Arrival) for name in names]
        met = f"{len(arrivals)} of {self._nodes} nodes write to the same {self.folder.parent}"
        seen = Finding("shared folder", len(arrivals) >= self._nodes, f"{met}, {time.monotonic() - begin:.1f} s")
        return [seen, self._clock(arrival, arrivals, skew_s)]

    def agree(self, fit: bool) -> bool:
        """Whether every node is `fit` so far, as each of them gets to know before what only all can do together."""
        write_atomic(self.folder / f"{self._host}.{'fit' if fit else 'unfit'}", b"")
        deadline = time.monotonic() + self._timeout_s
        while True:
            names = list_fresh(self.folder)
            fit_nodes, unfit = (sum(name.endswith(suffix) for name in names) for suffix in (".fit", ".unfit"))
            if unfit or fit_nodes >= self._nodes or time.monotonic() > deadline:
                return not unfit and fit_nodes >= self._nodes
            time.sleep(POLL_S)

    def report(self, findings: list[Finding]) -> None:
        """Hand in what this node has found."""
        write_atomic(self.folder / f"{self._host}.report", msgspec.json.encode(Report(self._host, findings)))

    def reports(self) -> list[Report]:
        """The reports of all nodes, by name; those that do not come in time are left out."""
        names = self._wait(".report")
        return [msgspec.json.decode((self.folder / name).read_bytes(), type=Report) for name in sorted(names)]

    def end(self) -> None:
        """Remove the folder, once every node has handed in its report or never will."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _clock(self, mine: Arrival, arrivals: list[Arrival], skew_s: float) -> Finding:
        """Against the middle one of all clocks, so that one bad clock does not blame the others."""
        middle = sorted(a.ahead_s for a in arrivals)[len(arrivals) // 2]
        off = mine.ahead_s - middle
        words = f"{off:+.2f} s from the others'"
        return Finding("clock", abs(off) <= skew_s, words if abs(off) <= skew_s else f"{words}: set it (chrony, ntp)")

    def _wait(self, suffix: str) -> list[str]:
        deadline = time.monotonic() + self._timeout_s
        while True:
            names = [name for name in list_fresh(self.folder) if name.endswith(suffix) and not name.startswith(".")]
            if len(names) >= self._nodes or time.monotonic() > deadline:
                return names
            time.sleep(POLL_S)
