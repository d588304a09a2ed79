"""What has to be installed before a sandbox can start."""

import os
import shutil
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "squeue", "scontrol", "slurmdbd", "mariadbd")
SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")


def search_path() -> str:
    """PATH with the folders of system programs, which an ordinary user's PATH lacks on Debian."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([*folders, *SYSTEM_FOLDERS]))


def missing_programs() -> list[str]:
    """Names of the programs that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]


def how_to_install() -> str:
    """The command that installs them on Debian or Ubuntu."""
    packages = (Path(__file__).parent / "packages.txt").read_text().split()
    return f"apt-get install --no-install-recommends {' '.join(packages)}"
