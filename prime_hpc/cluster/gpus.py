"""GPUs of this machine, found without importing torch."""

import os
import shutil
import subprocess


def count_gpus() -> int:
    """GPUs that this process may use: CUDA_VISIBLE_DEVICES where it is set, else what nvidia-smi lists."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([v for v in visible.split(",") if v.strip()])
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def visible_devices(indices: list[int]) -> str:
    """CUDA_VISIBLE_DEVICES for a process that gets the GPUs at `indices` of those this process may use."""
    mine = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = mine.split(",") if mine else None
    return ",".join(names[i] if names else str(i) for i in indices)
