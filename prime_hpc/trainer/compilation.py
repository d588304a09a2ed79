"""Blocks compiled one by one: all of one kind share the code, whatever the number of tokens."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves


def compile_block(block: nn.Module, *, fullgraph: bool) -> None:
    """Compile the forward and backward pass of `block`; with `fullgraph` a break of its graph is an error."""
    compiled = torch.compile(block.forward, fullgraph=fullgraph)

    def forward(*args: Any, **kwargs: Any) -> Any:
        # else the first row would be compiled for its own number of tokens and the second anew for any
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(*args, **kwargs)

    block.forward = forward


def compilations() -> dict[str, int]:
    """Graphs that this process compiled so far, and the breaks between them."""
    return {
        "compile/graphs": counters["stats"]["unique_graphs"],
        "compile/breaks": sum(counters["graph_break"].values()),
    }
