"""A real Slurm on one machine, with virtual nodes, for tests."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from prime_hpc.errors import DeadlineExceeded, InfrastructureFailure
from tools.slurm_sandbox import accounting, configuration, daemons, startup
from tools.slurm_sandbox.layout import Layout, free_ports, load
from tools.slurm_sandbox.waiting import wait_for

CANCEL_S = 15.0
COMMAND_S = 120.0
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY"}
READY = ("idle", "mixed", "allocated", "completing")


class SlurmSandbox:
    """Controller, virtual nodes and, if asked for, accounting, with every file below `directory`.

    `node0` has no GPUs; every other node has `gpus` of them, with no device behind. Partitions: `all` (the default),
    `cpu` (`node0`), `gpu` (the others), and `preemptible` (all nodes), whose jobs the other three requeue.
    """

    def __init__(self, directory: Path, nodes: int = 5, cpus: int = 4, gpus: int = 2, accounting: bool = False):
        base_port = free_ports(nodes + 2)
        self.layout = Layout(directory.resolve(), nodes, cpus, gpus, accounting, startup.best_isolation(), base_port)

    @classmethod
    def attach(cls, directory: Path) -> Self:
        """The sandbox that was started in `directory`, perhaps by another process."""
        sandbox = cls.__new__(cls)
        sandbox.layout = load(directory.resolve())
        return sandbox

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def up(self) -> None:
        """Start everything and wait until every node is idle.

        Raises:
            InfrastructureFailure: something is not installed, the directory is unfit, or a daemon ended at once.
            DeadlineExceeded: a daemon or a node did not get ready.
        """
        startup.prepare(self.layout)
        try:
            self._start_daemons()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Cancel the jobs, stop the daemons, end what is left of the jobs. The logs stay."""
        try:
            if daemons.find(self.layout, "slurmctld"):
                self.cancel(self.jobs())
        finally:
            self._stop_daemons()

    @property
    def env(self) -> dict[str, str]:
        """The variables that lead Slurm's commands to this sandbox; add them to `os.environ`."""
        return daemons.variables(self.layout)

    def run(self, command: Sequence[str], check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command against the sandbox; its output is text.

        Raises:
            InfrastructureFailure: it failed and `check` is true.
        """
        env = daemons.environment(self.layout)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        if check and done.returncode:
            raise InfrastructureFailure(f"{' '.join(command)} exited {done.returncode}: {done.stderr or done.stdout}")
        return done

    def submit(self, *arguments: str) -> str:
        """`sbatch` with these arguments; the id of the job, of a heterogeneous one its leader's."""
        return self.run(["sbatch", "--parsable", *arguments]).stdout.strip()

    def states(self, job: str) -> dict[str, str]:
        """State of each component by its id (`7`, or `7+0`, `7+1`, ...) as the controller knows it: until 300 s after
        its end."""
        return _fields(self.run(["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%i|%T"]).stdout)

    def sacct(self, job: str) -> dict[str, str]:
        """State of each component by its id, from accounting, which hears of it a moment after the controller."""
        command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=JobID,State"]
        return _fields(self.run(command).stdout)

    def accounted(self, job: str, state: str, components: int = 1) -> dict[str, str]:
        """What accounting has of a job's components, once it knows as many and has `state` of each.

        Raises:
            DeadlineExceeded: it is not after two minutes.
        """

        def reached() -> dict[str, str]:
            now = self.sacct(job)
            return now if len(now) >= components and set(now.values()) == {state} else {}

        return wait_for(reached, f"{state} of job {job}", "slurmdbd", 120.0)

    def wait(self, job: str, *states: str, timeout_s: float = 240.0) -> dict[str, str]:
        """The components' states once each is one of `states`.

        Raises:
            InfrastructureFailure: one of them ended otherwise.
            DeadlineExceeded: they did not get there within `timeout_s` seconds.
        """
        wanted = " or ".join(states)

        def reached() -> dict[str, str]:
            now = self.states(job)
            missing = set(now.values()) - set(states)
            if missing & ENDED:
                raise InfrastructureFailure(f"job {job} will not be {wanted}: {now}; see its output")
            return {} if missing else now

        try:
            return wait_for(reached, f"{wanted} of job {job}", "slurmctld", timeout_s)
        except DeadlineExceeded as late:
            late.add_note(self.run(["squeue", "--states=all", "--format=%i %T %r %N"]).stdout)
            raise

    def jobs(self) -> set[str]:
        """Ids of the jobs that have not ended, of heterogeneous ones the leaders'."""
        listed = self.run(["squeue", "--noheader", "--format=%i"]).stdout.split()
        return {re.split(r"[+_]", job)[0] for job in listed}

    def cancel(self, jobs: set[str]) -> None:
        """Cancel these and wait until they have ended."""
        for node in self.layout.names:
            if not self._alive(slurmd_name(node)):
                # Jobs of a node that cannot answer would be completing until it is given up.
                self.give_up(node)
        if jobs:
            self.run(["scancel", *jobs], check=False)
            wait_for(lambda: not jobs & self.jobs(), f"the end of jobs {', '.join(jobs)}", "slurmctld", CANCEL_S)

    def add_partition(self, name: str, nodes: Sequence[str], **options: str) -> None:
        """Add a partition, e.g. `add_partition("short", ["node1"], MaxTime="1", PriorityTier="20")`."""
        with self.layout.conf.open("a") as file:
            file.write(configuration.partition(name, nodes, options) + "\n")
        self.run(["scontrol", "reconfigure"])

    def node_state(self, node: str) -> str:
        """As `sinfo` names it: idle, mixed, allocated, down, ...; a final `*` means that it does not answer."""
        return self.run(["sinfo", "--noheader", f"--nodes={node}", "--partition=all", "--format=%T"]).stdout.strip()

    def kill_slurmd(self, node: str) -> None:
        """Kill a node's slurmd and leave its tasks running: to the controller the node is lost, to the tasks nothing
        happened."""
        daemons.kill(self._alive(slurmd_name(node)))

    def kill_node(self, node: str) -> None:
        """End a node as a power cut would: slurmd, steps and tasks at once."""
        self.kill_slurmd(node)
        daemons.kill(daemons.job_processes(self.layout, node))

    def hide(self, node: str, folder: Path) -> None:
        """Cover a folder with an empty one in what the node sees, as where a shared file system is not mounted."""
        [process] = self._alive(slurmd_name(node))
        self.run(startup.mount_command(self.layout, process.pid, folder))

    def give_up(self, node: str) -> None:
        """Have the controller call a node down at once, rather than after a quarter of a minute of silence."""
        self.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=test"])

    def restart_slurmd(self, node: str) -> None:
        """Stop a node's slurmd if it runs, start it, and wait until the controller hears from it."""
        daemons.stop(self.layout, slurmd_name(node))
        self._start_slurmd(node)
        self._wait_for_slurmd(node)

    def restart_slurmctld(self) -> None:
        """Stop the controller and start it from its saved state."""
        daemons.stop(self.layout, "slurmctld")
        self._start_slurmctld()

    def log(self, name: str) -> str:
        """Text of a daemon's log: `slurmctld`, `slurmd-node0`, ..., `slurmdbd`, `mariadbd`, `munged`."""
        return self.layout.log(name).read_text(errors="replace")

    def _start_daemons(self) -> None:
        daemons.start(self.layout, "munged", startup.munged_command(self.layout))
        daemons.wait_until(self.layout, "munged", "its socket", self.layout.munge_socket.exists)
        if self.layout.accounting:
            accounting.start(self.layout)
        self._start_slurmctld("-c")
        for node in self.layout.names:
            self._start_slurmd(node)
        for node in self.layout.names:
            self._wait_for_slurmd(node)

    def _stop_daemons(self) -> None:
        # The controller goes first: without it the nodes' end is no event to wait for.
        daemons.stop(self.layout, "slurmctld")
        daemons.stop(self.layout, *map(slurmd_name, self.layout.names))
        daemons.kill(daemons.job_processes(self.layout))
        for name in ("slurmdbd", "mariadbd", "munged"):
            daemons.stop(self.layout, name)

    def _start_slurmctld(self, *options: str) -> None:
        daemons.start(self.layout, "slurmctld", ["slurmctld", "-D", *options])
        daemons.wait_until(self.layout, "slurmctld", "an answer", self._controller_answers)

    def _controller_answers(self) -> bool:
        return self.run(["scontrol", "ping"], check=False).returncode == 0

    def _start_slurmd(self, node: str) -> None:
        daemons.start(self.layout, slurmd_name(node), startup.slurmd_command(self.layout, node))

    def _wait_for_slurmd(self, node: str) -> None:
        daemons.wait_until(self.layout, slurmd_name(node), f"{node} ready", lambda: self.node_state(node) in READY)

    def _alive(self, daemon: str) -> list[psutil.Process]:
        process = daemons.find(self.layout, daemon)
        return [process] if process else []


def slurmd_name(node: str) -> str:
    return f"slurmd-{node}"


def _fields(lines: str) -> dict[str, str]:
    """First to second field of lines such as `7+0|RUNNING`."""
    return dict(line.split("|", 1) for line in lines.splitlines())
