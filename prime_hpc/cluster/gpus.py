"""GPUs of this machine, found without importing torch."""

import os
import shutil
import subprocess


def count_gpus() -> int:
    """GPUs that this process may use: CUDA_VISIBLE_DEVICES where it is set, else what nvidia-smi lists."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([v for v in visible.split(",") if v.strip()])
    return len(list_gpus())


def list_gpus() -> list[str]:
    """Names of all GPUs of this machine, as nvidia-smi lists them."""
    if not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    lines = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return [line.partition(": ")[2].partition(" (")[0] for line in lines]


def visible_devices(indices: list[int]) -> str:
    """CUDA_VISIBLE_DEVICES for a process that gets the GPUs at `indices` of those this process may use."""
    mine = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = mine.split(",") if mine else None
    return ",".join(names[i] if names else str(i) for i in indices)
