"""Clipping of gradients that lie on several meshes."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def clip_gradients(parameters: list[nn.Parameter], limit: float | None) -> float:
    """Scale all gradients down to a global norm of `limit`, if there is one; returns the norm before.

    Every shard counts once, wherever it is and however many copies it has. The norm is the same on all ranks.
    """
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in (p for p in parameters if p.grad is not None):
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    if not by_mesh:
        return 0.0
    total = torch.stack([_norm(group) for group in by_mesh.values()]).norm()
    for group in by_mesh.values() if limit is not None else ():
        nn.utils.clip_grads_with_norm_(group, limit, total)
    return float(total)


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    """Of parameters on one mesh."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
