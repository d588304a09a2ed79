"""GPUs by name: what memory and time estimates need to know of them."""

from dataclasses import dataclass

from prime_hpc.config.cluster import component
from prime_hpc.config.run import RunConfig
from prime_hpc.models.spec import device_peak_flops

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """A GPU: bytes of memory that programs see, bytes a second between it and the cores, dense bfloat16 FLOP/s."""

    name: str
    memory: float
    bandwidth: float
    flops: float


_MEMORY = {
    "GB200": (184, 8.0e12),
    "B200": (179, 8.0e12),
    "H200": (139.8, 4.8e12),
    "H100": (79.1, 3.35e12),
    "A100": (79.1, 2.04e12),
    "MI325X": (256, 6.0e12),
    "MI300X": (191, 5.3e12),
}
"""GiB and bytes a second of the largest model of each name; from the vendors' data sheets."""
DEVICES = tuple(_MEMORY)


def known_device(text: str) -> Device | None:
    """The GPU that a text such as `NVIDIA H200` or `gpu:h100` names, if it is one of ours."""
    words = text.upper().replace("-", " ").replace(":", " ").replace("_", " ").split()
    name = next((name for name in _MEMORY if name in words), None)
    if name is None:
        return None
    gib, bandwidth = _MEMORY[name]
    return Device(name, gib * GIB, bandwidth, device_peak_flops(name) or 0.0)


def device_of(config: RunConfig, name: str, here: str | None) -> Device | None:
    """The GPU of a component's nodes by `gpu`, `gres` or `constraint` of its keys; of this machine, the one `here`."""
    own = component(config.cluster, name)
    texts = (own.gpu, own.gres, own.constraint) if config.launcher.on_slurm else (own.gpu, here)
    return next((device for text in texts if text and (device := known_device(text))), None)
