"""What the fake engine answers: reversed text with a skill that grows with the version, or random tokens."""

import json
import random
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from prime_hpc.models.tiny import ASSISTANT, EOS, USER
from prime_hpc.models.tiny_vision import IMAGE

MAX_RANDOM_TOKENS = 16


class FakeOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`inference.engine_args` of the fake engine. A reply is right with probability skill0 + skill_per_version * step.

    `token_s` are seconds a token; `faults` maps a kind of fault to how many requests it strikes from the start.
    `kv_tokens` is the size of its KV cache, of which it tells nothing where that is 0. `routing`
    (layers, experts, top_k) makes up the experts of every token, as an engine records them.
    """

    skill0: float = 0.2
    skill_per_version: float = 0.05
    token_s: float = 0.0
    kv_tokens: int = 0
    faults: dict[str, int] = {}
    routing: tuple[int, int, int] | None = None


class Policy:
    """Replies from the vocabulary in a model's directory. Equal generators give equal replies."""

    def __init__(self, model: Path, options: FakeOptions):
        self._options = options
        self.model = model
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.vocabulary = max(tokenizer.get_vocab().values()) + 1
        self.ordinary = sorted(set(tokenizer.get_vocab().values()) - special)
        self.placeholder = tokenizer.token_to_id(IMAGE)
        """Stands for an image in a prompt."""
        self.eos = tokenizer.token_to_id(EOS)
        self._user, self._assistant = tokenizer.token_to_id(USER), tokenizer.token_to_id(ASSISTANT)
        self._reverses = None not in (self.eos, self._user, self._assistant)
        if self.eos is None:
            self.eos = _configured_eos(model)

    def reply(self, prompt: list[int], step: int, rng: random.Random) -> list[int]:
        """A reply to `prompt` of the policy after `step` optimiser steps, with its end-of-sequence token."""
        if not self._reverses:
            length = rng.randint(1, MAX_RANDOM_TOKENS)
            return [*rng.choices(self.ordinary, k=length), self.eos]
        answer = self._last_message(prompt)[::-1]
        if rng.random() >= min(1.0, self._options.skill0 + self._options.skill_per_version * step):
            self._corrupt(answer, rng)
        return [*answer, self.eos]

    def _last_message(self, prompt: list[int]) -> list[int]:
        end = len(prompt) - 1 - prompt[::-1].index(self._assistant) if self._assistant in prompt else len(prompt)
        begin = end - prompt[:end][::-1].index(self._user) if self._user in prompt[:end] else 0
        return prompt[begin:end]

    def _corrupt(self, answer: list[int], rng: random.Random) -> None:
        """Replace one token by another, or add one to nothing."""
        at = rng.randrange(len(answer)) if answer else 0
        wrong = [token for token in self.ordinary if token not in answer[at : at + 1]]
        answer[at : at + 1] = [rng.choice(wrong)]


def _configured_eos(model: Path) -> int:
    config = json.loads((model / "config.json").read_text())
    eos = config.get("text_config", config)["eos_token_id"]
    return eos[0] if isinstance(eos, list) else eos
