"""Before training: does a model of transformers score packed documents as it would score each by itself?"""

import logging
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from prime_hpc.config.run import RunConfig
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.trainer.distributed import World
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.trainer.policy_hf import HFPolicy
from prime_hpc.trainer.row import PackedRow

LENGTHS = [7, 12, 9]
LEAK = {"float32": 1e-4, "bfloat16": 0.1}
"""Nats that a score may move, through rounding alone, when tokens of another document change."""
ERROR = {"float32": 1e-3, "bfloat16": 0.25}
"""Mean distance in nats from the scores of the model's own forward, by eager attention, that rounding may explain."""


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def check_scores(policy: PolicyModel, config: RunConfig, world: World, log: logging.Logger) -> None:
    """All ranks call this alike. Documents that see one another are run one by one from then on.

    Raises:
        ConfigurationError: scores are not those of the model.
    """
    if not isinstance(policy, HFPolicy) or policy.sees or not config.trainer.self_check:
        return
    row, kind, dtype = _make_row(policy, world.device), policy.config.model_type, config.trainer.dtype
    if not policy.one_by_one and _leak(policy, row) > LEAK[dtype]:
        policy.one_by_one = True
        log.warning("packed documents of %s see one another in transformers: they are run one by one", kind)
    error = _agree((policy(row)[0] - _own_scores(policy, row))[row.scored].abs().mean())
    if not error <= ERROR[dtype]:
        expected = (f"a model whose scores are those of its own forward in transformers; those of {kind} are off by "
                    f"{error:.2g} nats on average, with attention by {policy.kernels}. Try trainer.attn=eager; "
                    "trainer.self_check=false trains all the same")  # fmt: skip
        raise ConfigurationError([ConfigProblem("model.path", config.model.path, expected)])


def _make_row(policy: HFPolicy, device: torch.device) -> PackedRow:
    generator, n = torch.Generator().manual_seed(0), sum(LENGTHS)
    tokens = torch.randint(policy.config.get_text_config().vocab_size, (n,), generator=generator).to(device)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).to(device)
    return PackedRow(tokens, positions, torch.ones(n, device=device), positions.nonzero()[:, 0], LENGTHS)


def _leak(policy: HFPolicy, row: PackedRow) -> float:
    """By how much scores of the other documents move when all tokens of the first are turned around."""
    first = LENGTHS[0]
    other = replace(row, token_ids=torch.cat([row.token_ids[:first].flip(0), row.token_ids[first:]]))
    return _agree((policy(row)[0] - policy(other)[0])[first:].abs().max())


def _own_scores(policy: HFPolicy, row: PackedRow) -> Tensor:
    """float32[n]; 0 for the first token of each document."""
    scores = []
    for document in row.token_ids.split(row.seq_lens):
        logprobs = policy.own_logits(document)[:-1].log_softmax(-1)
        scores += [logprobs.new_zeros(1), logprobs.gather(-1, document[1:, None])[:, 0]]
    return torch.cat(scores)


def _agree(value: Tensor) -> float:
    """The largest of all ranks, not a number if that of any is not."""
    value = torch.nan_to_num(value, nan=torch.inf).cpu()
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()
