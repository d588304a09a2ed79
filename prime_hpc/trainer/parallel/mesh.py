"""All ranks of the trainer as meshes of named dimensions."""

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from prime_hpc.models.degrees import Degrees


@dataclass(frozen=True)
class Mesh:
    """Views of the same ranks in the same order, the last dimension of each fastest.

    Rows of a batch are divided along [dp_replicate x dp_shard, cp, tp], parameters along [dp_replicate, fsdp, tp] with
    fsdp = dp_shard x cp, and experts along [dp_replicate, efsdp, ep, tp] with efsdp x ep = fsdp.
    """

    degrees: Degrees
    fsdp: DeviceMesh
    """Where parameters are sharded: [fsdp], or [dp_replicate, fsdp] for several copies."""
    expert_fsdp: DeviceMesh | None
    """Where an expert's matrices are sharded under expert parallelism, likewise."""
    ep: DeviceMesh | None
    tp: DeviceMesh | None
    cp: ProcessGroup | None
    """Ranks that divide a row among them."""

    @classmethod
    def of(cls, device_type: str, degrees: Degrees) -> "Mesh":
        """Made by all ranks together. What has one rank only is left out."""
        copies, ep, cp, tp = degrees.dp_replicate, degrees.ep, degrees.cp, degrees.tp
        dense = _view(device_type, "fsdp", dp_replicate=copies, fsdp=degrees.fsdp, tp=tp)
        sparse = _view(device_type, "efsdp", dp_replicate=copies, efsdp=degrees.fsdp // ep, ep=ep, tp=tp)
        rows = _view(device_type, "dp", dp=degrees.dp, cp=cp, tp=tp)
        # lets one collective add up what lies on both dimensions, such as the norm of all gradients
        for view, pair in ((dense, ("fsdp", "tp")), (sparse, ("efsdp", "ep"))):
            if set(pair) <= set(view.mesh_dim_names or ()):
                view[pair]._flatten("_".join(pair))
        return cls(
            degrees=degrees,
            fsdp=_sharded(dense, "fsdp"),
            expert_fsdp=_sharded(sparse, "efsdp") if ep > 1 else None,
            ep=sparse["ep"] if ep > 1 else None,
            tp=dense["tp"] if tp > 1 else None,
            cp=rows.get_group("cp") if cp > 1 else None,
        )


def _view(device_type: str, needed: str, **sizes: int) -> DeviceMesh:
    """A mesh over all ranks of the dimensions that are larger than 1, and of the `needed` one."""
    kept = {name: size for name, size in sizes.items() if size > 1 or name == needed}
    return init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _sharded(view: DeviceMesh, dimension: str) -> DeviceMesh:
    copies = "dp_replicate" in (view.mesh_dim_names or ())
    return view["dp_replicate", dimension] if copies else view[dimension]
