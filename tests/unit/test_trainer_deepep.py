"""Where tokens that DeepEP brought go, and what is refused without it; test_parallel.py sends some."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from prime_hpc.config.checks import find_conflicts
from prime_hpc.config.schema import parse
from prime_hpc.errors import ConfigurationError
from prime_hpc.trainer.parallel.deepep import Arrival, open_buffer
from tests import standins

CHOSEN = torch.tensor([[1, -1, 0], [-1, 1, -1], [0, 2, 1], [-1, -1, 2]])
"""Of three experts, by four tokens."""
STANDINS = str(Path(standins.__file__).parent)
PAIR = SimpleNamespace(size=lambda: 2)


def test_tokens_go_to_the_experts_that_are_here_and_are_summed_up():
    arrival = Arrival.of(CHOSEN, experts=3, pairs=7)
    assert arrival.counts.tolist() == [2, 3, 2]
    rows = arrival.scatter(torch.arange(4.0)[:, None])
    assert rows[:, 0].tolist() == [0, 2, 0, 1, 2, 2, 3]
    weights = torch.arange(1.0, 13.0).view(4, 3)
    made = torch.tensor([1.0, 1, 10, 10, 10, 100, 100])[:, None]
    assert arrival.gather(made, weights)[:, 0].tolist() == [1 * 10 + 3 * 1, 5 * 10, 7 * 1 + 8 * 100 + 9 * 10, 12 * 100]


def test_gradients_of_arrivals_are_those_of_finite_differences():
    arrival = Arrival.of(CHOSEN, experts=3, pairs=7)
    x, rows = (torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in (4, 7))
    weights = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(arrival.scatter, (x,))
    assert torch.autograd.gradcheck(arrival.gather, (rows, weights))


def test_a_rank_may_receive_nothing():
    arrival = Arrival.of(CHOSEN[:0], experts=3, pairs=0)
    rows = arrival.scatter(torch.ones(0, 2, requires_grad=True))
    y = arrival.gather(rows, torch.ones(0, 3, requires_grad=True))
    assert arrival.counts.tolist() == [0, 0, 0] and rows.shape == y.shape == (0, 2)
    y.sum().backward()


def test_without_deepep_it_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "deep_ep" else find(name, *_))
    with pytest.raises(ConfigurationError, match=r"ep_dispatch = 'deepep': expected all_to_all, or DeepEP installed"):
        open_buffer(PAIR, hidden=64)


def test_a_buffer_has_room_for_both_ways(monkeypatch):
    monkeypatch.syspath_prepend(STANDINS)
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    buffer = open_buffer(PAIR, hidden=64)
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (2 * 256 * 2 * 64, 0)
    monkeypatch.delitem(sys.modules, "deep_ep")


@pytest.mark.parametrize(("dtype", "ep", "problems"), [
    ("float32", 2, 1), ("bfloat16", 1, 1), ("float32", 1, 2), ("bfloat16", 2, 0), ("bfloat16", "auto", 0),
])  # fmt: skip
def test_deepep_is_refused_in_float32_and_where_no_experts_are_divided(dtype, ep, problems):
    config = parse({"trainer": {"dtype": dtype, "parallel": {"ep_dispatch": "deepep", "ep": ep}}})
    assert [p.key for p in find_conflicts(config)].count("trainer.parallel.ep_dispatch") == problems
