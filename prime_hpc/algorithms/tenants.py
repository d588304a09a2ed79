"""The parts of a packed row that belong to different adapters: each has a loss and normalisers of its own."""

from dataclasses import dataclass
from itertools import groupby

import msgspec

from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import MicroBatch


@dataclass(frozen=True)
class Tenancy:
    """The tokens of one adapter in a row, and these tokens as a micro-batch of their own."""

    adapter: str
    tokens: slice
    micro: MicroBatch


def split_by_adapter(micro: MicroBatch) -> list[Tenancy]:
    """The tenancies of a row in order: the row itself where there is one, of no name where there are no adapters."""
    runs = [(adapter, len(list(run))) for adapter, run in groupby(micro.adapters)]
    if len(runs) < 2:
        return [Tenancy(runs[0][0] if runs else "", slice(0, sum(micro.seq_lens)), micro)]
    parts, first, start = [], 0, 0
    for adapter, count in runs:
        last = first + count
        end = start + sum(micro.seq_lens[first:last])
        parts.append(Tenancy(adapter, slice(start, end), _part(micro, slice(first, last), slice(start, end))))
        first, start = last, end
    return parts


def _part(micro: MicroBatch, sequences: slice, tokens: slice) -> MicroBatch:
    """What a loss reads of a part."""
    streams = {field: Array.of(value.numpy()[tokens], value.dtype)
               for field in micro.__struct_fields__ if isinstance(value := getattr(micro, field), Array)}  # fmt: skip
    lists = {field: getattr(micro, field)[sequences] for field in ("seq_lens", "sources", "adapters")}
    return msgspec.structs.replace(micro, **streams, **lists, routed_experts=None)
