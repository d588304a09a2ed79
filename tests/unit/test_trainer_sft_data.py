"""SFT rows: exact masks on the character tokenizer, order of rows, and errors that name the line."""

import json
import shutil
import string
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer

from prime_hpc.config import compose
from prime_hpc.config.checks import find_conflicts
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import find_schema_problems, parse
from prime_hpc.config.sections import ModelConfig
from prime_hpc.config.sft_rows import DATA, VALIDATION_DATA, Conversation, open_rows, parse_row
from prime_hpc.config.trainer import SFTConfig, SFTFile
from prime_hpc.errors import ConfigurationError
from prime_hpc.models.tiny import ASSISTANT, EOS, USER, make_char_tokenizer, write_char_tokenizer
from prime_hpc.trainer.probe import split_last_reply
from prime_hpc.trainer.sft_data import (
    load_tokenizer,
    make_render,
    render_template,
    to_sample,
)
from prime_hpc.trainer.sft_order import RowOrder, apportion

TWO_TURNS = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "ba"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "c"},
]
ROW = Conversation(TWO_TURNS)
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_char_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_replies_and_their_end_token_are_trained_and_nothing_else(tokenizer):
    row = make_render(tokenizer, ModelConfig(), SFTConfig())(ROW)
    text = tokenizer.convert_ids_to_tokens(row.token_ids.tolist())
    assert text == [USER, "a", "b", ASSISTANT, "b", "a", EOS, USER, "c", ASSISTANT, "c", EOS]
    assert row.mask.astype(int).tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(("config", "trained"), [
    ({"roles": ["user"]}, [0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0]),
    ({"roles": ["assistant", "user"]}, [0, 1, 1, 0, 1, 1, 1, 0, 1, 0, 1, 1]),
    ({"last_reply_only": True}, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]),
    ({"roles": ["assistant", "user"], "last_reply_only": True}, [0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 1, 1]),
])  # fmt: skip
def test_messages_are_trained_by_role(tokenizer, config, trained):
    row = make_render(tokenizer, ModelConfig(), SFTConfig(**config))(ROW)
    assert row.mask.astype(int).tolist() == trained


def test_a_text_is_found_behind_what_looks_like_it_and_by_its_trimmed_form(tokenizer, monkeypatch):
    template = "{% for m in messages %}{{ m.role }}<user>{{ m.content | trim }}<eos>tool{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    row = Conversation([{"role": "tool", "content": "tool "}, {"role": "system", "content": "x"}])
    rendered = render_template(tokenizer, row, SFTConfig(roles=["tool"]))
    assert np.flatnonzero(rendered.mask).tolist() == [5, 6, 7, 8]
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}<user>{{ m.content | upper }}{% endfor %}")
    with pytest.raises(ConfigurationError, match="model.renderer.*keeps every text as it is"):
        render_template(tokenizer, row, SFTConfig(roles=["tool"]))


@pytest.mark.parametrize(("config", "trained"), [
    ({}, ["ba<|im_end|>", "<think>\n\n</think>\n\nc<|im_end|>"]),
    ({"last_reply_only": True}, ["<think>\n\n</think>\n\nc<|im_end|>"]),
    ({"roles": ["user"]}, ["ab", "c"]),
])  # fmt: skip
def test_a_renderer_of_the_package_masks_alike(tmp_path: Path, config, trained):
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
               "<tool_response>", "</tool_response>"]  # fmt: skip
    tokenizer = write_char_tokenizer(tmp_path, special, string.printable, pad="<|endoftext|>", eos="<|im_end|>",
                                     template="", max_length=256)  # fmt: skip
    row = make_render(tokenizer, ModelConfig(renderer="qwen3"), SFTConfig(**config))(Conversation(TWO_TURNS))
    edges = np.flatnonzero(np.diff(row.mask, prepend=False, append=False)).reshape(-1, 2)
    assert [tokenizer.decode(row.token_ids[start:end]) for start, end in edges] == trained
    with pytest.raises(ConfigurationError, match="trainer.sft.data = 'rows:3'.*that the renderer qwen3 takes"):
        make_render(tokenizer, ModelConfig(renderer="qwen3"), SFTConfig())(Conversation([], place="rows:3"))


def test_what_a_template_adds_after_the_end_token_is_not_trained(tokenizer, monkeypatch):
    template = tokenizer.chat_template.replace("{% endgeneration %}", "{% endgeneration %}z")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    row = render_template(tokenizer, Conversation(TWO_TURNS[:2]), SFTConfig())
    assert tokenizer.convert_ids_to_tokens(row.token_ids.tolist())[-2:] == [EOS, "z"]
    assert row.mask.astype(int).tolist() == [0, 0, 0, 0, 1, 1, 1, 0]


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer, monkeypatch):
    template = "{% for m in messages %}{{ m.content if loop.last else 'x' }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(ConfigurationError, match="model.renderer.*keeps earlier turns"):
        render_template(tokenizer, ROW, SFTConfig())


def test_a_sample_joins_the_cross_entropy_alone_and_is_cut(tokenizer):
    sample = to_sample(render_template(tokenizer, ROW, SFTConfig()), "0.7", max_tokens=6)
    assert sample.sample_id == "0.7"
    assert len(sample.token_ids) == 6
    assert sample.ce_weights.numpy().tolist() == [0, 0, 0, 0, 1, 1]
    assert sample.mask.numpy().tolist() == [False] * 4 + [True] * 2
    assert sample.rl_weights.numpy().tolist() == [0] * 6
    assert set(sample.versions.numpy()) == {-1}


def test_the_last_reply_is_parted_from_its_prompt(tokenizer):
    prompt, reply = split_last_reply(render_template(tokenizer, ROW, SFTConfig()))
    assert tokenizer.convert_ids_to_tokens(prompt.tolist())[-1] == ASSISTANT
    assert tokenizer.convert_ids_to_tokens(reply.tolist()) == ["c", EOS]


def test_batches_run_through_every_epoch_in_a_new_order():
    order = RowOrder([5], None, seed=7, shuffle=True)
    flat = [draw for step in range(1, 6) for draw in order.batch(step, 3)]
    assert [draw.turn for draw in flat] == [0] * 5 + [1] * 5 + [2] * 5
    orders = [[draw.row for draw in flat if draw.turn == epoch] for epoch in range(3)]
    assert [sorted(rows) for rows in orders] == [list(range(5))] * 3
    assert orders[0] != orders[1]
    assert RowOrder([5], None, seed=7, shuffle=True).batch(4, 3) == flat[9:12]
    assert RowOrder([5], None, 7, shuffle=False).batch(2, 3) == [(0, 0, 3), (0, 0, 4), (1, 0, 0)]


def test_files_are_trained_by_their_shares_and_every_row_as_often_as_its_neighbours():
    assert [draw.file for draw in RowOrder([2, 4], None, 0, shuffle=False).batch(1, 6)] == [0, 0, 1, 1, 1, 1]
    order = RowOrder([2, 8], [3, 2], seed=1, shuffle=True)
    drawn = [draw for step in range(1, 9) for draw in order.batch(step, 5)]
    for epoch in range(4):
        files = [draw.file for draw in drawn[10 * epoch : 10 * epoch + 10]]
        assert (files.count(0), files.count(1)) == (6, 4), "of 10 rows an epoch"
        assert files != sorted(files)
    assert Counter(draw[1:] for draw in drawn) == {**{(0, i): 12 for i in range(2)}, **{(1, i): 2 for i in range(8)}}
    assert [draw.turn for draw in drawn if draw.file == 1] == [0] * 8 + [1] * 8
    assert apportion(10, [1, 1000]) == [1, 9]
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]


@pytest.mark.parametrize(("text", "expected"), [
    ('{"messages": [{"role": "user", "content": "a"}]}\n{"messages": []}\n', ":2'.*not empty"),
    ('{"messages": [}\n', ":1'.*JSON object"),
    ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}\n', ":1'.*messages of text"),
    ('{"messages": "hello"}\n', ":1'.*not empty"),
    ('{"messages": ["hello"]}\n', ":1'.*a `role` each"),
    ('{"messages": [{"role": "user"}]}\n', ":1'.*with `content`, or with `tool_calls`"),
    ('{"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}\n', ":1'.*function: {name, arguments}"),
    ('{"messages": [{"role": "user", "content": "a"}], "tools": [{"x": 1}]}\n', ":1'.*`tools` of the form"),
    ('{"prompt": "a"}\n', ":1'.*`prompt` and `completion`"),
    ("", "at least one row"),
    ("\n \n", "at least one row"),
])  # fmt: skip
def test_bad_data_is_refused_by_line(text, expected, tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=f"trainer.sft.data.*{expected}") as caught:
        list(open_rows(path, DATA))
    assert [p for p in problems_of(path) if p.key == DATA] == caught.value.problems, "at launch too"


def test_a_launch_reads_the_first_rows_alone(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "\u2028"}]}\n' * 100 + "{}")
    assert not problems_of(path)
    rows = open_rows(path, DATA)
    assert (len(rows), rows[99].place) == (101, f"{path}:100")
    with pytest.raises(ConfigurationError, match=":101'"):
        rows[100]


def problems_of(*paths: Path, shares: tuple[float | None, ...] = (None, None)):
    config = RunConfig(mode="sft")
    config.trainer.sft.data = [SFTFile(path=str(path), share=share) for path, share in zip(paths, shares, strict=False)]
    return [problem for problem in find_conflicts(config) if problem.key.startswith(DATA)]


def test_the_last_reply_needs_the_assistant_among_the_roles():
    config = parse({"mode": "sft", "trainer": {"sft": {"roles": ["user"], "last_reply_only": True}}})
    assert [p.key for p in find_conflicts(config) if "last_reply" in p.key] == ["trainer.sft.last_reply_only"]
    assert [p.key for p in find_schema_problems({"trainer": {"sft": {"roles": ["asistant"]}}})] == [
        "trainer.sft.roles.0"
    ]
    assert [p.key for p in find_schema_problems({"trainer": {"sft": {"roles": []}}})] == ["trainer.sft.roles"]


def test_files_have_shares_all_or_none(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n')
    assert not problems_of(path, path) and not problems_of(path, path, shares=(1, 2))
    assert [p.key for p in problems_of(path, path, shares=(1, None))] == ["trainer.sft.data.1.share"]
    assert [p.value for p in problems_of(path, tmp_path / "absent")] == [str(tmp_path / "absent")]


@pytest.mark.parametrize(("validation", "expected"), [
    ({"every": 5}, {"data": "a file of rows, or rows of trainer.sft.data"}),
    ({"rows": 5}, {"every": "steps between validations"}),
    ({"every": 5, "rows": 5, "data": "ROWS"}, {"rows": "0, since trainer.sft.validation.data has all rows"}),
    ({"every": 5, "data": [{"path": "ROWS", "share": 2}]}, {"data.0.share": "none"}),
    ({"every": 5, "data": "absent.jsonl"}, {"data": "an existing JSONL or parquet file"}),
    ({"every": 5, "data": "ROWS"}, {}),
    ({"every": 5, "rows": 5}, {}),
])  # fmt: skip
def test_a_validation_has_rows_of_one_kind_and_a_step(validation, expected, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ROWS").write_text('{"prompt": "a", "completion": "b"}\n')
    config = parse({"mode": "sft", "trainer": {"sft": {"data": "ROWS", "validation": validation}}})
    prefix = "trainer.sft.validation."
    found = {p.key.removeprefix(prefix): p.expected for p in find_conflicts(config) if p.key.startswith(prefix)}
    assert found.keys() == expected.keys() and all(found[key].startswith(expected[key]) for key in expected)


def test_prompt_and_completion_are_messages_and_the_prompt_is_context(tokenizer):
    row = parse_row({"prompt": "ab", "completion": "ba", "messages": None}, "rows:1", DATA)
    assert row == Conversation(TWO_TURNS[:2], context=1, place="rows:1")
    row = parse_row({"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]}, "rows:1", DATA)
    rendered = make_render(tokenizer, ModelConfig(), SFTConfig())(row)
    assert rendered.token_ids.tolist() == render_template(tokenizer, ROW, SFTConfig()).token_ids.tolist()
    assert rendered.mask.astype(int).tolist() == [0] * 10 + [1, 1], "the reply of the prompt is not trained"


def test_tools_and_calls_reach_the_template_as_mappings(tokenizer, monkeypatch):
    called = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "ab"}'}}]}  # fmt: skip
    template = ("{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
                "{% for m in messages %}<user>{{ m.content }}"
                "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}{% endfor %}")  # fmt: skip
    monkeypatch.setattr(tokenizer, "chat_template", template)
    for tools in (TOOLS, json.dumps(TOOLS), [TOOLS[0]["function"]]):
        row = parse_row({"messages": [TWO_TURNS[0], called], "tools": tools}, "rows:1", DATA)
        assert row.tools == TOOLS
        text = tokenizer.convert_ids_to_tokens(render_template(tokenizer, row, SFTConfig()).token_ids.tolist())
        assert text == ["f", USER, "a", "b", USER, "a", "b"]
    called["tool_calls"][0]["function"]["arguments"] = '{"x": '
    row = parse_row({"messages": [called]}, "rows:1", DATA)
    assert row.messages[0]["tool_calls"][0]["function"]["arguments"] == '{"x": ', "as the model wrote it"


def test_a_message_that_the_template_does_not_take_is_named(tokenizer):
    row = parse_row({"messages": [{"role": "tool", "content": "a"}]}, "rows.jsonl:7", DATA)
    expected = "trainer.sft.data = 'rows.jsonl:7'.*TemplateError.*knows only user and assistant"
    with pytest.raises(ConfigurationError, match=expected) as caught:
        make_render(tokenizer, ModelConfig(), SFTConfig())(row)
    assert not caught.value.restartable


def test_whatever_a_template_or_renderer_raises_names_the_row(tokenizer, monkeypatch):
    template = "{% for m in messages %}{{ m.content + 1 }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    monkeypatch.setattr("renderers.create_renderer", lambda *arguments: None)
    for key, model, error in (
        (DATA, ModelConfig(), "TypeError"),
        (VALIDATION_DATA, ModelConfig(renderer="qwen3"), "AttributeError"),
    ):
        row = parse_row({"messages": TWO_TURNS}, "rows.jsonl:7", key)
        with pytest.raises(ConfigurationError, match=f"{key} = 'rows.jsonl:7'.*{error}") as caught:
            make_render(tokenizer, model, SFTConfig())(row)
        assert not caught.value.restartable


def test_tools_of_a_row_reach_a_renderer(tokenizer, monkeypatch):
    seen = {}

    def build(renderer, messages, *, tools, **options):
        seen["tools"] = tools
        return SimpleNamespace(token_ids=[1], loss_mask=[True])

    monkeypatch.setattr("renderers.create_renderer", lambda *arguments: None)
    monkeypatch.setattr("renderers.build_training_sample", build)
    make_render(tokenizer, ModelConfig(renderer="qwen3"), SFTConfig())(Conversation(TWO_TURNS, TOOLS))
    assert seen["tools"] == TOOLS


def test_blank_lines_are_no_rows(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"messages": [{"role": "user", "content": "a"}]}\n \r\n{"prompt": "a", "completion": "b"}\n\n')
    rows = open_rows(path, DATA)
    assert [rows[i].place for i in range(len(rows))] == [f"{path}:2", f"{path}:4"]
    assert not problems_of(path)


def test_parquet_has_the_same_rows(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    rows = [{"messages": TWO_TURNS, "tools": None, "reward": 1.0},
            {"messages": [TWO_TURNS[0], {"role": "assistant", "content": None, "tool_calls": [call]}],
             "tools": json.dumps(TOOLS), "reward": 0.5}]  # fmt: skip
    write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=1)
    read = open_rows(tmp_path / "rows.parquet", DATA)
    expected = [parse_row(row, f"{tmp_path}/rows.parquet:{i}", DATA) for i, row in enumerate(rows, 1)]
    assert [read[i] for i in range(len(read))] == expected
    assert expected[1].messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert not problems_of(tmp_path / "rows.parquet")
    (tmp_path / "broken.parquet").write_text("rows")
    assert "a parquet file" in problems_of(tmp_path / "broken.parquet")[0].expected


def test_parquet_without_pyarrow_is_refused(tmp_path: Path, monkeypatch):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    [problem] = problems_of(tmp_path / "rows.parquet")
    assert problem.expected == "a JSONL file, or pyarrow to read parquet with: pip install 'prime-hpc[parquet]'"


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
        open_rows(tmp_path / "absent.jsonl", DATA)


def test_masks_have_the_type_that_messages_want(tokenizer):
    row = render_template(tokenizer, ROW, SFTConfig())
    assert (row.token_ids.dtype, row.mask.dtype) == (np.int32, np.bool_)


def test_replies_end_with_the_model_s_token_whatever_the_tokenizer_says(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.eos_token = "<user>"
    tokenizer.save_pretrained(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token == "<user>"
    assert load_tokenizer(ModelConfig(path=str(tmp_path / "model"))).eos_token == "<eos>"
