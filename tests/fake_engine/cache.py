"""A KV cache that holds nothing: who has a place in it, who waits for one, and who lost it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass
class Place:
    """What a request holds."""

    tokens: int


class Cache:
    """Room for `capacity` tokens; without end, and untold, where that is 0. Who finds no room for a further token is
    preempted: it gives up its place and takes one again, as large, once there is room."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.used = self.running = self.waiting = self.preemptions = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def place(self, tokens: int) -> AsyncIterator[Place]:
        """A place for a prompt of so many tokens."""
        place = Place(0)
        await self._take(place, tokens)
        try:
            yield place
        finally:
            await self._give_back(place)

    async def grow(self, place: Place) -> None:
        """One token more."""
        if not self.capacity or self.used < self.capacity or self.running == 1:
            place.tokens += 1
            self.used += 1
            return
        tokens = place.tokens
        self.preemptions += 1
        await self._give_back(place)
        await self._take(place, tokens + 1)

    def tell(self) -> str:
        """The gauges as vLLM gives them; nothing without a capacity."""
        if not self.capacity:
            return ""
        values = {
            "num_requests_running": self.running,
            "num_requests_waiting": self.waiting,
            "kv_cache_usage_perc": self.used / self.capacity,
            "num_preemptions_total": self.preemptions,
        }
        lines = [f'vllm:{name}{{engine="0"}} {value}' for name, value in values.items()]
        size = f'vllm:cache_config_info{{block_size="1",num_gpu_blocks="{self.capacity}"}} 1.0'
        return "\n".join([*lines, size, ""])

    async def _take(self, place: Place, tokens: int) -> None:
        self.waiting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self.running or not self.capacity
                                             or self.used + tokens <= self.capacity)  # fmt: skip
        finally:
            self.waiting -= 1
        self.running += 1
        self.used += tokens
        place.tokens = tokens

    async def _give_back(self, place: Place) -> None:
        self.running -= 1
        self.used -= place.tokens
        place.tokens = 0
        async with self._changed:
            self._changed.notify_all()
