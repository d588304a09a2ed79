"""Writes that wait for space: a full disk stops a run for a while, not for good."""

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from prime_hpc.cluster.beats import Heart
from prime_hpc.errors import InfrastructureFailure

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
RETRY_S = 2.0

T = TypeVar("T")


class Patience:
    """Tries a write again for `wait_s` seconds while the disk is full, and says so."""

    def __init__(self, wait_s: float, heart: Heart, log: logging.Logger):
        self._wait_s, self._heart, self._log = wait_s, heart, log

    def write(self, what: str, action: Callable[[], T]) -> T:
        """What `action` returns; it must be repeatable, a part of it that was written included.

        Raises:
            InfrastructureFailure: the disk stayed full.
            OSError: the write failed for another reason.
        """
        deadline = time.monotonic() + self._wait_s
        with self._heart.waiting(f"space for {what}", "the file system", self._wait_s):
            while True:
                try:
                    return action()
                except OSError as error:
                    if error.errno not in DISK_FULL:
                        raise
                    if time.monotonic() > deadline:
                        raise InfrastructureFailure(f"{what} could not be written for {self._wait_s:.0f} s: {error}; "
                                                    "free space, then resume") from error  # fmt: skip
                    self._log.error("%s cannot be written: %s; free space, it is tried again", what, error)
                    time.sleep(RETRY_S)
