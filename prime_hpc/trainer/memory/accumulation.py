"""Gradients of several micro-batches on weights that are gathered once."""

from torch.distributed.fsdp import FSDPModule


def hold_gathered(policy: FSDPModule, *, last: bool) -> None:
    """Before all micro-batches of a step but the `last`: keep weights gathered and gradients unreduced after the
    backward pass. With the last one gradients are reduced, and weights freed."""
    policy.set_is_last_backward(last)
    policy.set_requires_gradient_sync(last)
    policy.set_reshard_after_backward(last)
