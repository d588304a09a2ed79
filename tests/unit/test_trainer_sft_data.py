"""SFT rows: exact masks on the character tokenizer, order of rows, and errors that name the line."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from prime_hpc.config import compose
from prime_hpc.config.checks import find_conflicts
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import parse
from prime_hpc.config.sections import ModelConfig
from prime_hpc.config.sft_rows import read_messages
from prime_hpc.errors import ConfigurationError
from prime_hpc.models.tiny import ASSISTANT, EOS, USER, make_char_tokenizer
from prime_hpc.trainer.probe import split_last_reply
from prime_hpc.trainer.sft_data import (
    batch_rows,
    load_tokenizer,
    make_render,
    render_template,
    to_sample,
)

TWO_TURNS = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "ba"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "c"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_char_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_replies_and_their_end_token_are_trained_and_nothing_else(tokenizer):
    row = make_render(tokenizer, "default")(TWO_TURNS)
    text = tokenizer.convert_ids_to_tokens(row.token_ids.tolist())
    assert text == [USER, "a", "b", ASSISTANT, "b", "a", EOS, USER, "c", ASSISTANT, "c", EOS]
    assert row.mask.astype(int).tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]


def test_what_a_template_adds_after_the_end_token_is_not_trained(tokenizer, monkeypatch):
    template = tokenizer.chat_template.replace("{% endgeneration %}", "{% endgeneration %}z")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    row = render_template(tokenizer, TWO_TURNS[:2])
    assert tokenizer.convert_ids_to_tokens(row.token_ids.tolist())[-2:] == [EOS, "z"]
    assert row.mask.astype(int).tolist() == [0, 0, 0, 0, 1, 1, 1, 0]


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer, monkeypatch):
    template = "{% for m in messages %}{{ m.content if loop.last else 'x' }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(ConfigurationError, match="model.renderer.*keeps earlier turns"):
        render_template(tokenizer, TWO_TURNS)


def test_a_sample_joins_the_cross_entropy_alone_and_is_cut(tokenizer):
    sample = to_sample(render_template(tokenizer, TWO_TURNS), "0.7", max_tokens=6)
    assert sample.sample_id == "0.7"
    assert len(sample.token_ids) == 6
    assert sample.ce_weights.numpy().tolist() == [0, 0, 0, 0, 1, 1]
    assert sample.mask.numpy().tolist() == [False] * 4 + [True] * 2
    assert sample.rl_weights.numpy().tolist() == [0] * 6
    assert set(sample.versions.numpy()) == {-1}


def test_the_last_reply_is_parted_from_its_prompt(tokenizer):
    prompt, reply = split_last_reply(render_template(tokenizer, TWO_TURNS))
    assert tokenizer.convert_ids_to_tokens(prompt.tolist())[-1] == ASSISTANT
    assert tokenizer.convert_ids_to_tokens(reply.tolist()) == ["c", EOS]


def test_batches_run_through_every_epoch_in_a_new_order():
    drawn = [batch_rows(5, 3, step, seed=7, shuffle=True) for step in range(1, 6)]
    flat = [pair for batch in drawn for pair in batch]
    assert [epoch for epoch, _ in flat] == [0] * 5 + [1] * 5 + [2] * 5
    orders = [[row for e, row in flat if e == epoch] for epoch in range(3)]
    assert [sorted(order) for order in orders] == [list(range(5))] * 3
    assert orders[0] != orders[1]
    assert batch_rows(5, 3, 4, seed=7, shuffle=True) == drawn[3]
    assert batch_rows(5, 3, 2, seed=7, shuffle=False) == [(0, 3), (0, 4), (1, 0)]


@pytest.mark.parametrize(("text", "expected"), [
    ('{"messages": [{"role": "user"}]}\n{"messages": []}\n', ":2'.*not empty"),
    ('{"messages": [}\n', ":1'.*JSON object"),
    ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}\n', ":1'.*messages of text"),
    ('{"messages": "hello"}\n', ":1'.*not empty"),
    ('{"messages": ["hello"]}\n', ":1'.*a `role` each"),
    ("", "at least one row"),
])  # fmt: skip
def test_bad_data_is_refused_by_line(text, expected, tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=f"trainer.sft.data.*{expected}") as caught:
        read_messages(path)
    config = RunConfig(mode="sft")
    config.trainer.sft.data = str(path)
    assert [p for p in find_conflicts(config) if p.key == "trainer.sft.data"] == caught.value.problems, "at launch too"


def test_a_launch_reads_the_first_rows_alone(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "\u2028"}]}\n' * 100 + "{}\n")
    config = RunConfig(mode="sft")
    config.trainer.sft.data = str(path)
    assert not [p for p in find_conflicts(config) if p.key == "trainer.sft.data"]
    with pytest.raises(ConfigurationError, match=":101'"):
        read_messages(path)


def test_keys_that_sft_would_ignore_are_refused(tmp_path: Path):
    source = {"id": "prime_hpc.envs.reverse_text"}
    config = parse({
        "mode": "sft", "env": {"train": [source], "eval": {"sources": [source], "every": 5}},
        "algorithm": {"name": "max_rl"}, "frozen": {"big": {"path": "/big"}},
        "orchestrator": {"batch_size": 8}, "inference": {"vllm": {"seed": 1}},
        "trainer": {"replay": {"until": 3}, "router_replay": True}, "monitor": {"rollouts": False},
    })  # fmt: skip
    found = {p.key: p.value for p in find_conflicts(config) if "mode=sft trains on rows" in p.expected}
    assert found == {
        "algorithm.name": "max_rl", "env.train": [source["id"]], "env.eval.sources": [source["id"]],
        "env.eval.every": 5,
        "inference.vllm": ["seed"], "frozen": ["big"], "orchestrator.batch_size": 8, "monitor.rollouts": False,
        "trainer.replay.until": 3, "trainer.router_replay": True,
    }  # fmt: skip


@pytest.mark.parametrize("experiment", ["tiny_sft_cpu", "reverse_text_sft_cpu", "reverse_text_sft"])
def test_experiments_set_nothing_that_sft_ignores(experiment: str):
    config = compose.compose_run([f"+experiment={experiment}", "model.path=/other"])
    assert {p.key for p in find_conflicts(config)} == {"model.path", "trainer.sft.data"}, "which are not there"


def test_missing_data_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="absent.jsonl"):
        read_messages(tmp_path / "absent.jsonl")


def test_masks_have_the_type_that_messages_want(tokenizer):
    row = render_template(tokenizer, TWO_TURNS)
    assert (row.token_ids.dtype, row.mask.dtype) == (np.int32, np.bool_)


def test_replies_end_with_the_model_s_token_whatever_the_tokenizer_says(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.eos_token = "<user>"
    tokenizer.save_pretrained(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token == "<user>"
    assert load_tokenizer(ModelConfig(path=str(tmp_path / "model"))).eos_token == "<eos>"
