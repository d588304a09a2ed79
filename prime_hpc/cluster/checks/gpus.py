"""Are the GPUs there, empty, without memory errors and at full clocks? By nvidia-smi, without torch."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import Element, ParseError, fromstring

from prime_hpc.cluster.checks.finding import Finding
from prime_hpc.cluster.gpus import count_gpus

CHECK = "GPUs"
CLEAN_MIB = 1024
"""More memory in use than this, before anything of ours has started, was left behind by somebody."""
DEVICES = Path("/dev")


def inspect_gpus(wanted: int, devices: Path = DEVICES, *, in_use: bool = False) -> Finding:
    """Compare this node's GPUs with the number that a run needs there; `in_use`: others of its processes use them."""
    if not shutil.which("nvidia-smi"):
        seen = count_gpus()
        words = f"{seen} GPUs, not examined: no nvidia-smi" if seen else "no GPU"
        return Finding(CHECK, seen >= wanted, words if seen >= wanted else f"{words}; {wanted} are needed")
    answer = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, text=True)
    try:
        gpus = fromstring(answer.stdout).findall("gpu")
    except ParseError:
        return Finding(CHECK, wanted == 0, f"nvidia-smi fails: {(answer.stdout + answer.stderr).strip()}")
    faults = [f"{len(gpus)} of {wanted} GPUs"] if len(gpus) < wanted else []
    faults += [f"GPU {i}: {fault}" for i, gpu in enumerate(gpus) for fault in _faults(gpu, in_use)]
    faults += _dead_files(devices)
    return Finding(CHECK, not faults, "; ".join(faults) or f"{len(gpus)} GPUs")


def _faults(gpu: Element, in_use: bool) -> Iterator[str]:
    """Names of tags differ between drivers, so they are looked for by what they contain."""
    used = _number(gpu.findtext("fb_memory_usage/used"))
    if used is None:
        yield "does not answer"
        return
    if used > CLEAN_MIB and not in_use:
        yield f"{used} MiB in use already: end the process that left it, or take another node"
    errors = sum(_number(tag.text) or 0 for tag in gpu.iterfind("ecc_errors/volatile//*") if "uncorrect" in tag.tag)
    if errors:
        yield f"{errors} uncorrected memory errors: take another node and tell its keepers"
    slow = [tag.tag for tag in gpu.iter() if tag.tag.endswith("hw_slowdown") and tag.text == "Active"]
    if slow:
        yield "the hardware holds its clocks down (heat or power)"


def _dead_files(devices: Path) -> list[str]:
    """Device files of GPUs that cannot be opened. One that this process may not open belongs to another job."""
    dead = []
    for path in sorted(devices.glob("nvidia[0-9]*")):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        except PermissionError:
            continue
        except OSError as error:
            dead.append(f"{path} is dead ({error.strerror})")
    return dead


def _number(text: str | None) -> int | None:
    found = re.match(r"\d+", text or "")
    return int(found[0]) if found else None
