"""Links over gloo: buckets arrive whole, and a receiver that dies or stands still ends the link and nothing else."""

import os
import signal
import time

import torch
import torch.distributed as dist

from prime_hpc.transport.links import IpcLink
from tests.links_support import BUCKETS, calm, exchange, expected

SHORT_S = 1.0


def die(rank: int, number: int) -> None:
    if (rank, number) == (2, 2):
        os.kill(os.getpid(), signal.SIGKILL)


def stand_still(rank: int, number: int) -> None:
    if (rank, number) == (1, 2):
        time.sleep(3 * SHORT_S)


def test_buckets_arrive_at_every_receiver() -> None:
    answers, failure = exchange("gloo", ["cpu"] * 3, calm)
    assert failure is None
    assert answers == {1: expected(), 2: expected()}
    assert len(expected()) == BUCKETS


def test_nothing_is_waited_for_where_nothing_was_posted() -> None:
    IpcLink(dist.HashStore(), 0, 2, torch.device("cpu"), stall_s=0.1).settle()


def test_a_receiver_that_dies_is_noticed() -> None:
    answers, failure = exchange("gloo", ["cpu"] * 3, die)
    assert failure is not None and failure.startswith("a receiver of weights is lost")
    assert 2 not in answers and "InfrastructureFailure: the sender of weights" in answers[1]


def test_a_receiver_that_stands_still_is_given_up() -> None:
    answers, failure = exchange("gloo", ["cpu"] * 2, stand_still, stall_s=SHORT_S)
    assert failure is not None and failure.startswith("a receiver of weights")
    assert "InfrastructureFailure: the sender of weights is lost" in answers[1]
