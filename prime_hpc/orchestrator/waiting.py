"""Waits for what another process owes: each under its name, with an owner and a deadline."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from prime_hpc.cluster.role import Role
from prime_hpc.errors import DeadlineExceeded

T = TypeVar("T")


async def in_time(role: Role, what: str, owner: str, awaited: Awaitable[T]) -> T:
    """Await `what` from `owner`, under the deadline that the trainer has for a batch.

    Raises:
        DeadlineExceeded: it did not come.
    """
    timeout_s = role.config.batch_deadline_s
    with role.heart.waiting(what, owner, timeout_s):
        return await within(timeout_s, role, what, owner, awaited)


async def within(timeout_s: float, role: Role, what: str, owner: str, awaited: Awaitable[T]) -> T:
    """The same under another deadline, for a wait beside the work, which holds nobody up.

    Raises:
        DeadlineExceeded: it did not come.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await awaited
    except TimeoutError:
        raise DeadlineExceeded(role.process.name, what, owner, timeout_s) from None
