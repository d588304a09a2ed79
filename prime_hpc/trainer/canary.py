"""The trainer's side of the canary: its log-probabilities of a fixed token sequence, for engines to be held against."""

import torch

from prime_hpc.trainer.distributed import World
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.trainer.row import PackedRow
from prime_hpc.transport.weights import Canary

MAX_LENGTH = 64


class CanaryScorer:
    """Scores the sequence at every `every`-th version, 0 for none. All ranks call it alike.

    An engine samples one token behind it, for which there must be room within `seq_len`.
    """

    def __init__(self, policy: PolicyModel, world: World, seq_len: int, every: int):
        self._policy, self._world, self._every = policy, world, every
        self._asked = 0
        generator = torch.Generator().manual_seed(0)
        length = min(MAX_LENGTH, seq_len - 1)
        self._token_ids = torch.randint(policy.config.get_text_config().vocab_size, (length,), generator=generator)

    @torch.no_grad()
    def score(self) -> Canary | None:
        """The trainer's scores under the weights of now, where they are due."""
        due = self._every and self._asked % self._every == 0
        self._asked += 1
        if not due:
            return None
        token_ids = self._token_ids.to(self._world.device)
        places = torch.arange(len(token_ids), device=token_ids.device)
        row = PackedRow(token_ids, places, torch.ones_like(places, dtype=torch.float32), places[1:], [len(places)])
        logprobs, _ = self._policy(row)
        return Canary(token_ids=self._token_ids.tolist(), logprobs=logprobs[1:].tolist())
