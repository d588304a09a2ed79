"""Exact match on held-out rows during SFT: sample a reply to each prompt and compare it with the reference."""

import numpy as np
import torch
from torch import Tensor

from prime_hpc.config.trainer import SFTProbe
from prime_hpc.trainer.distributed import World, gather
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.trainer.sft_data import Row


class Probe:
    """Held-out rows, divided among the ranks; those of tensor parallelism share theirs. The last reply of each row is
    the reference."""

    def __init__(self, rows: list[Row], config: SFTProbe, world: World, end_token: int, seed: int):
        pairs = [split_last_reply(row) for row in rows]
        # every rank samples as many rows, since ranks meet in every forward; repeated rows are not counted
        self._part, parts = world.rank // world.mesh.degrees.tp, world.size // world.mesh.degrees.tp
        share = -(-len(pairs) // parts)
        mine = range(self._part * share, (self._part + 1) * share)
        self._pairs = [pairs[min(i, len(pairs) - 1)] for i in mine]
        self._counted = [i < len(pairs) for i in mine]
        self._config, self._world, self._end, self._seed = config, world, end_token, seed
        self.example: tuple[list[int], np.ndarray] | None = None
        """The newest reply to the first prompt, and its reference."""

    def exact_match(self, policy: PolicyModel, step: int) -> float:
        """Share of replies sampled at `step` that equal the reference, over all ranks."""
        config, prompts = self._config, [prompt for prompt, _ in self._pairs]
        generator = torch.Generator(self._world.device).manual_seed(hash((self._seed, step, self._part)))
        replies = sample_replies(policy, prompts, config.max_tokens, config.temperature, self._end, generator)
        self.example = replies[0], self._pairs[0][1]
        hits = [reply == list(reference) and counted for reply, (_, reference), counted
                in zip(replies, self._pairs, self._counted, strict=True)]  # fmt: skip
        totals = gather([sum(hits), sum(self._counted)])
        return sum(hit for hit, _ in totals) / sum(count for _, count in totals)


def split_last_reply(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Tokens before the last trained stretch of a row, and that stretch."""
    trained = np.flatnonzero(row.mask)
    end = trained[-1] + 1
    start = np.flatnonzero(~row.mask[:end])[-1] + 1
    return row.token_ids[:start], row.token_ids[start:end]


@torch.no_grad()
def sample_replies(
    policy: PolicyModel,
    prompts: list[np.ndarray],
    max_tokens: int,
    temperature: float,
    end_token: int,
    generator: torch.Generator,
) -> list[list[int]]:
    """One reply to each prompt, its end token included; temperature 0 takes the likeliest token.

    Always `max_tokens` forwards, so that ranks whose replies end early still meet the others in theirs.
    """
    device = generator.device
    tokens, mask = (x.to(device) for x in _pad_left(prompts))
    cache, replies = None, []
    for _ in range(max_tokens):
        logits, cache = policy.next_logits(tokens, mask, cache)
        tokens = _pick(logits, temperature, generator)[:, None]
        mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
        replies.append(tokens)
    return [_until(reply, end_token) for reply in torch.cat(replies, dim=1).tolist()]


def _pick(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]


def _pad_left(prompts: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """int64[b, longest] token ids and mask."""
    longest = max(len(prompt) for prompt in prompts)
    tokens, mask = (torch.zeros(len(prompts), longest, dtype=torch.int64) for _ in range(2))
    for i, prompt in enumerate(prompts):
        tokens[i, longest - len(prompt) :] = torch.from_numpy(prompt)
        mask[i, longest - len(prompt) :] = 1
    return tokens, mask


def _until(reply: list[int], end_token: int) -> list[int]:
    return reply[: reply.index(end_token) + 1] if end_token in reply else reply
