"""What a sandbox needs before and when its daemons start: folders and files, and their command lines."""

import os
import secrets
import shutil
import subprocess
from pathlib import Path

from prime_hpc.errors import InfrastructureFailure
from tools.slurm_sandbox import configuration, daemons
from tools.slurm_sandbox.layout import Isolation, Layout, check_socket_paths
from tools.slurm_sandbox.packages import how_to_install, missing_programs

KEY_BYTES = 128
FOLDERS = ("run", "log", "munge", "state", "spool", "dev", "database")
OWN_NAME = 'mount --bind "$1" /etc/hosts && hostname "$2" && exec slurmd -D -N "$2"'
UNSHARE: dict[Isolation, list[str]] = {
    "root": ["unshare", "--uts", "--mount"],
    "user": ["unshare", "--user", "--map-current-user", "--keep-caps", "--uts", "--mount"],
}


def prepare(layout: Layout) -> None:
    """Empty folders and fresh files for a start.

    Raises:
        InfrastructureFailure: programs are not installed, the directory is too deep, a sandbox runs there, or
            something that is no sandbox lies there.
    """
    if missing := missing_programs():
        raise InfrastructureFailure(f"{', '.join(missing)} not found; run {how_to_install()}")
    check_socket_paths(layout)
    _check_directory(layout)
    for name in FOLDERS:
        shutil.rmtree(layout.directory / name, ignore_errors=True)
        (layout.directory / name).mkdir(mode=0o700)
    for node in layout.names:
        (layout.directory / "spool" / node).mkdir()
    for index in range(layout.gpus):
        (layout.directory / "dev" / f"gpu{index}").symlink_to("/dev/null")
    key = layout.directory / "munge" / "key"
    key.write_bytes(secrets.token_bytes(KEY_BYTES))
    key.chmod(0o400)
    configuration.write(layout)
    layout.save()


def best_isolation() -> Isolation:
    """What this user may do so that every node has a host name of its own."""
    kind: Isolation = "root" if os.geteuid() == 0 else "user"
    probe = [*UNSHARE[kind], "mount", "--bind", "/etc/hosts", "/etc/hosts"]
    return kind if subprocess.run(probe, capture_output=True, check=False).returncode == 0 else "none"


def munged_command(layout: Layout) -> list[str]:
    """Forced, since munged would want its socket open to every user; the sandbox serves one."""
    folder = layout.munge_socket.parent
    return ["munged", "--foreground", "--force", f"--key-file={folder}/key", f"--socket={layout.munge_socket}",
            f"--pid-file={folder}/munged.pid", f"--log-file={layout.log('munged')}", f"--seed-file={folder}/seed",
            "--num-threads=4"]  # fmt: skip


def slurmd_command(layout: Layout, node: str) -> list[str]:
    if layout.isolation == "none":
        return ["slurmd", "-D", "-N", node]
    hosts = str(layout.conf.parent / "hosts")
    return [*UNSHARE[layout.isolation], "sh", "-c", OWN_NAME, "sh", hosts, node]


def mount_command(layout: Layout, pid: int, folder: Path) -> list[str]:
    """Mount an empty file system over `folder` for the slurmd of that process id.

    Raises:
        InfrastructureFailure: nodes have no view of their own of the files here.
    """
    if layout.isolation == "none":
        raise InfrastructureFailure("nothing can be hidden from one node: nodes share this machine's mounts")
    user = ["--user", "--preserve-credentials"] if layout.isolation == "user" else []
    return ["nsenter", f"--target={pid}", *user, "--mount", "mount", "-t", "tmpfs", "tmpfs", str(folder)]


def _check_directory(layout: Layout) -> None:
    layout.directory.mkdir(parents=True, exist_ok=True)
    if (layout.directory / "sandbox.json").exists():
        if daemons.find(layout, "slurmctld") or daemons.find(layout, "munged"):
            raise InfrastructureFailure(f"a sandbox runs in {layout.directory}; stop it with the verb `down`")
    elif any(layout.directory.iterdir()):
        raise InfrastructureFailure(f"{layout.directory} is not empty; choose a new directory")
