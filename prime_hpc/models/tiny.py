"""A language model small enough to post-train on a laptop: a character tokenizer and a 0.86M-parameter Qwen3.

The demo and the tests run the real pipeline on it. Torch and transformers are imported where they are used, so that
importing this module costs nothing.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, USER, ASSISTANT, EOS = SPECIAL_TOKENS = ("<pad>", "<user>", "<assistant>", "<eos>")
"""Ids 0 to 3, in this order; the characters of the alphabet follow."""
LETTERS = string.ascii_lowercase
MAX_POSITIONS = 256
"""Longest sequence of the tiny model, in tokens."""
VOCAB_MULTIPLE = 32
HEADS = 4

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}<user>{{ message.content }}"
    "{% elif message.role == 'assistant' %}<assistant>"
    "{% generation %}{{ message.content }}<eos>{% endgeneration %}"
    "{% else %}{{ raise_exception('the character tokenizer knows only user and assistant messages') }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""`<user>text<assistant>reply<eos>`; a template of pure concatenation, so a later turn never changes earlier tokens."""


def make_char_tokenizer(path: Path, alphabet: str = LETTERS) -> PreTrainedTokenizerFast:
    """Write a tokenizer of one token a character to `path` and return it.

    Decoding an encoded text gives it back unchanged. A character outside `alphabet` becomes `<pad>`: it may not raise,
    as `renderers` encodes the markers of reasoning formats with any tokenizer to look for them in a reply.
    """
    return write_char_tokenizer(path, SPECIAL_TOKENS, alphabet, pad=PAD, eos=EOS, template=CHAT_TEMPLATE,
                                max_length=MAX_POSITIONS)  # fmt: skip


def write_char_tokenizer(path: Path, special: Sequence[str], alphabet: str, *, pad: str, eos: str, template: str,
                         max_length: int) -> PreTrainedTokenizerFast:  # fmt: skip
    """Write a tokenizer of the `special` tokens, whose ids come first, and of one token a character to `path`; anything
    else becomes `pad`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*special, *dict.fromkeys(alphabet)))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=pad))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        eos_token=eos,
        additional_special_tokens=[token for token in special if token not in (pad, eos)],
        chat_template=template,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
    tokenizer.save_pretrained(path)
    return tokenizer


def make_tiny_model(
    path: Path, seed: int, alphabet: str = LETTERS, hidden_size: int = 128, layers: int = 4
) -> Qwen3ForCausalLM:
    """Write a randomly initialised Qwen3 in float32, its tokenizer and generation config to `path` and return it.

    The same seed gives the same weights. The defaults have 0.86M parameters.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    tokenizer = make_char_tokenizer(path, alphabet)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(_config(len(tokenizer), hidden_size, layers))
    model.save_pretrained(path)
    return model


def _config(tokens: int, hidden_size: int, layers: int) -> Qwen3Config:
    """Shape of the model. The vocabulary is padded, as engines and sharded heads want a round number of rows."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=-(-tokens // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=hidden_size // HEADS,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        eos_token_id=SPECIAL_TOKENS.index(EOS),
        bos_token_id=None,
    )
