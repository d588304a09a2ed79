"""The optimisers (AdamW of torch, Muon, sign descent) over sharded parameters, and which part of a model each gets."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.optim import Optimizer

from prime_hpc.config import optimizer as config
from prime_hpc.config.optimizer import OptimizerConfig

Part = Literal["matrix", "embedding", "router", "vector"]
Groups = list[dict[str, Any]]
EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")
ROUTERS = ("mlp.router.weight", "mlp.router.gate.weight", "mlp.gate.weight")
CONVOLUTIONS = ("conv1d.weight", "conv.conv.weight")
GATES = ("shared_experts.gate.weight", "shared_expert_gate.weight")
"""Of one row."""
QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz iteration whose slope at zero is steepest (Jordan et al. 2024,
kellerjordan.github.io/posts/muon): singular values end between 0.7 and 1.2 rather than at 1, which does as well."""
ITERATIONS = 5
RMS_OF_ADAMW = 0.2
"""Root mean square of an update of AdamW, about (Liu et al. 2025, arXiv 2502.16982, section 2.2)."""


def build_optimizers(parameters: Iterable[tuple[str, nn.Parameter]], options: OptimizerConfig) -> list[Optimizer]:
    """Optimisers over the named parameters that train. Each group keeps its `peak_lr`, which a schedule scales.

    Vectors (norms, biases, what convolves single channels and the gate of a shared expert) do not decay.
    """
    parts: dict[Part, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in parameters:
        if parameter.requires_grad:
            parts[_part(name, parameter)].append(parameter)
    groups = {part: _group(part, members, options) for part, members in parts.items()}
    match options:
        case config.SignSGD():
            return [SignSGD(list(groups.values()))]
        case config.Muon():
            matrices = groups.pop("matrix", None)
            muon: list[Optimizer] = [Muon([matrices], options.momentum)] if matrices else []
            return muon + ([_adamw(list(groups.values()), options)] if groups else [])
        case config.AdamW():
            return [_adamw(list(groups.values()), options)]


def _group(part: Part, members: list[nn.Parameter], options: OptimizerConfig) -> dict[str, Any]:
    own = {"embedding": options.embedding_lr, "router": options.router_lr}.get(part)
    peak = options.lr if own is None else own
    return {"params": members, "lr": peak, "peak_lr": peak,
            "weight_decay": 0.0 if part == "vector" else options.weight_decay}  # fmt: skip


def _part(name: str, parameter: Tensor) -> Part:
    if parameter.ndim < 2 or name.endswith((*CONVOLUTIONS, *GATES)):
        return "vector"
    if name.endswith(EMBEDDINGS):
        return "embedding"
    return "router" if name.endswith(ROUTERS) else "matrix"


def _adamw(groups: Groups, options: config.AdamW | config.Muon) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, betas=tuple(options.betas), eps=options.eps,
                             fused=groups[0]["params"][0].is_cuda)  # fmt: skip


class SignSGD(Optimizer):
    """w <- (1 - lr * decay) w - lr * sign(gradient) (Bernstein et al. 2018, arXiv 1802.04434, algorithm 1)."""

    def __init__(self, groups: Groups):
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


class Muon(Optimizer):
    """Nesterov momentum, orthogonalised matrix by matrix (Jordan et al. 2024), scaled to the size of AdamW's updates
    (Liu et al. 2025, arXiv 2502.16982, eq. 4). A parameter is a matrix or a stack of matrices."""

    def __init__(self, groups: Groups, momentum: float):
        super().__init__(groups, {"momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for alike in _batches([p for p in group["params"] if p.grad is not None]):
                updates = orthogonalise([self._update(p, group["momentum"]) for p in alike])
                for parameter, update in zip(alike, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    size = RMS_OF_ADAMW * math.sqrt(max(parameter.shape[-2:]))
                    parameter.add_(update, alpha=-group["lr"] * size)

    def _update(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"].mul_(momentum).add_(parameter.grad)
        return parameter.grad.add(buffer, alpha=momentum)


def _batches(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one shape and layout, as many at a time as ranks share one: each rank then gets a whole one."""
    alike: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for p in parameters:
        alike[(p.shape, p.device_mesh, p.placements) if isinstance(p, DTensor) else p.shape].append(p)
    for members in alike.values():
        size = members[0].device_mesh.size() if isinstance(members[0], DTensor) else 1
        yield from (members[i : i + size] for i in range(0, len(members), size))


def orthogonalise(tensors: list[Tensor]) -> list[Tensor]:
    """The nearest semi-orthogonal matrices, about, of equally laid out matrices or stacks [..., m, n].

    Matrices that ranks share are exchanged, so that each rank computes whole ones, and exchanged back.
    """
    first = tensors[0]
    if not isinstance(first, DTensor):
        return [newton_schulz(tensor) for tensor in tensors]
    shared = [isinstance(p, Shard) and p.dim >= first.ndim - 2 for p in first.placements]
    stacked = _wrap(torch.stack([tensor.to_local() for tensor in tensors]), first, len(tensors),
                    [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in first.placements])  # fmt: skip
    whole = [Shard(0) if split else p for split, p in zip(shared, stacked.placements, strict=True)]
    mine = stacked.redistribute(placements=whole)
    done = _wrap(newton_schulz(mine.to_local()), first, len(tensors), whole).redistribute(placements=stacked.placements)
    return [DTensor.from_local(local, first.device_mesh, first.placements, run_check=False, shape=first.shape,
                               stride=first.stride()) for local in done.to_local().unbind()]  # fmt: skip


def _wrap(local: Tensor, like: DTensor, count: int, placements: list[Placement]) -> DTensor:
    """A stack of `count` tensors like `like`, of which `local` is this rank's part."""
    return DTensor.from_local(local, like.device_mesh, placements, run_check=False, shape=(count, *like.shape),
                              stride=(like.numel(), *like.stride()))  # fmt: skip


def newton_schulz(matrices: Tensor) -> Tensor:
    """U V^T, about, of each matrix U S V^T in [..., m, n]; in half precision on a GPU, which is exact enough."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)
