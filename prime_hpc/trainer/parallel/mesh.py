"""All ranks of the trainer as meshes of named dimensions."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from prime_hpc.models.degrees import Degrees


@dataclass(frozen=True)
class Mesh:
    """Views of the same ranks, the last dimension fastest. A dimension of size 1 is left out unless a user needs it."""

    degrees: Degrees
    fsdp: DeviceMesh
    """Where parameters are sharded: [fsdp], or [dp_replicate, fsdp] for several copies."""

    @classmethod
    def of(cls, device_type: str, degrees: Degrees) -> "Mesh":
        """Made by all ranks together."""
        dense = _view(device_type, dp_replicate=degrees.dp_replicate, fsdp=degrees.dp_shard)
        return cls(degrees, dense)


def _view(device_type: str, **sizes: int) -> DeviceMesh:
    """A mesh over all ranks of the dimensions that are larger than 1, and `fsdp`."""
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "fsdp"}
    return init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))
