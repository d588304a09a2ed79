"""The tiny model: a tokenizer without surprises and weights that a seed decides."""

from pathlib import Path

import pytest
import torch
from renderers import config_from_name, create_renderer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3VLForConditionalGeneration

from prime_hpc.models.tiny import make_char_tokenizer, make_tiny_model
from prime_hpc.models.tiny_vision import make_vision_model

USER, ASSISTANT, EOS = 1, 2, 3
CONVERSATION = [
    {"role": "user", "content": "abc"},
    {"role": "assistant", "content": "cba"},
    {"role": "user", "content": "xy"},
    {"role": "assistant", "content": "yx"},
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path):
    return AutoTokenizer.from_pretrained(tiny_model)


def test_every_letter_is_one_token_and_decoding_gives_the_text_back(tokenizer):
    assert tokenizer.encode("abz") == [4, 5, 29]
    text = "thequickbrownfoxjumpsoverthelazydog"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([4, 5, 29, EOS], skip_special_tokens=True) == "abz"


def test_another_alphabet_may_hold_spaces(tmp_path: Path):
    tokenizer = make_char_tokenizer(tmp_path, alphabet="ab \n")
    assert tokenizer.encode("a b\n") == [4, 6, 5, 7]
    assert AutoTokenizer.from_pretrained(tmp_path).decode([4, 6, 5, 7, 6, 6]) == "a b\n  "


def test_a_character_outside_the_alphabet_becomes_padding(tokenizer):
    assert tokenizer.encode("a!") == [4, 0]


def test_template_joins_turns_and_marks_replies(tokenizer):
    rendered = tokenizer.apply_chat_template(CONVERSATION, return_dict=True, return_assistant_tokens_mask=True)
    assert rendered["input_ids"] == [USER, 4, 5, 6, ASSISTANT, 6, 5, 4, EOS, USER, 27, 28, ASSISTANT, 28, 27, EOS]
    assert rendered["assistant_masks"] == [0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1]


def test_generation_prompt_is_a_prefix_of_the_answered_conversation(tokenizer):
    def render(messages: list[dict], prompt: bool) -> list[int]:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)

    assert render(CONVERSATION[:1], True) == [USER, 4, 5, 6, ASSISTANT]
    assert render(CONVERSATION, False)[: len(render(CONVERSATION[:3], True))] == render(CONVERSATION[:3], True)


def test_a_system_message_is_refused(tokenizer):
    with pytest.raises(Exception, match="only user and assistant"):
        tokenizer.apply_chat_template([{"role": "system", "content": "abc"}])


def test_model_has_the_promised_size_and_ends_at_eos(tiny_model: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert sum(p.numel() for p in model.parameters()) == 861_568
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert (model.config.vocab_size, model.config.tie_word_embeddings) == (32, False)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (EOS, 0)


def test_a_seed_decides_the_weights_and_leaves_the_callers_generator_alone(tiny_model: Path, tmp_path: Path):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    make_tiny_model(tmp_path / "same", seed=0)
    make_tiny_model(tmp_path / "other", seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    directories = (tiny_model, tmp_path / "same", tmp_path / "other")
    weights = [(path / "model.safetensors").read_bytes() for path in directories]
    assert weights[0] == weights[1] != weights[2]


def test_the_tiny_model_that_sees_speaks_as_the_renderer_of_its_family(tiny_vision_model: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_vision_model)
    shown = [{"type": "image_url", "image_url": {"url": "unread"}}, {"type": "text", "text": "name it"}]
    messages = [{"role": "user", "content": shown}, {"role": "assistant", "content": "red"},
                {"role": "user", "content": "again"}]  # fmt: skip
    renderer = create_renderer(tokenizer, config_from_name("qwen3-vl"))
    rendered = renderer.render(messages, add_generation_prompt=True, process_multimodal=False)
    assert rendered.token_ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(rendered.token_ids).startswith("<|im_start|>user\n<|vision_start|><|image_pad|><|")


def test_the_tiny_model_that_sees_has_the_promised_size(tiny_vision_model: Path, tmp_path: Path):
    make_vision_model(tmp_path, seed=0)
    same = (tiny_vision_model / "model.safetensors").read_bytes()
    assert (tmp_path / "model.safetensors").read_bytes() == same
    model = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path)
    assert sum(p.numel() for p in model.parameters()) == 392_320
