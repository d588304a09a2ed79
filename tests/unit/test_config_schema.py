"""The schema names every mistake of a configuration at once, with the nearest valid name."""

import dataclasses
import typing

import pytest

from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import find_schema_problems, known_keys, parse, to_dict
from prime_hpc.errors import ConfigProblem, ConfigurationError


def only(raw: dict) -> ConfigProblem:
    [problem] = find_schema_problems(raw)
    return problem


def test_all_problems_come_at_once():
    raw = {
        "max_step": 10,
        "seed": "one",
        "orchestrator": {"batch_size": 0, "group_sise": 4},
        "optimizer": {"name": "adamw", "lr": -1},
        "loss": {"name": "adam"},
        "env": {"train": [{"ratio": 0}]},
    }
    with pytest.raises(ConfigurationError) as caught:
        parse(raw)
    assert {p.key for p in caught.value.problems} == {
        "max_step", "seed", "orchestrator.batch_size", "orchestrator.group_sise", "loss.name", "optimizer.lr",
        "env.train.0.id", "env.train.0.ratio",
    }  # fmt: skip
    text = str(caught.value)
    assert text.startswith("8 problems in the configuration:")
    assert all(p.key in text for p in caught.value.problems)


@pytest.mark.parametrize(
    ("raw", "key", "nearest"),
    [
        ({"max_step": 1}, "max_step", "max_steps"),
        ({"orchestrator": {"max_stalenes": 1}}, "orchestrator.max_stalenes", "max_staleness"),
        ({"env": {"train": [{"id": "m", "sampling": {"topp": 1}}]}}, "env.train.0.sampling.topp", "top_p"),
        ({"trainer": {"sft": {"dta": "x"}}}, "trainer.sft.dta", "data"),
        ({"frozen": {"big": {"pth": "x"}}}, "frozen.big.pth", "path"),
        ({"zzzzzz": 1}, "zzzzzz", None),
    ],
)
def test_unknown_key_names_the_nearest(raw, key, nearest):
    problem = only(raw)
    assert (problem.key, problem.nearest) == (key, nearest)
    assert problem.expected.startswith("no such key; known here: ")


def test_wrong_choice_lists_the_choices():
    problem = only({"loss": {"name": "defualt"}})
    choices = "one of default, ipo, ppo, gspo, importance, custom"
    assert problem == ConfigProblem("loss.name", "defualt", choices, "default")
    assert str(problem) == f"loss.name = 'defualt': expected {choices}; did you mean 'default'?"


def test_a_wrong_key_is_judged_by_the_chosen_variant():
    problem = only({"loss": {"name": "ppo", "mask_low": 0.1}})
    assert problem.key == "loss.mask_low"
    assert problem.expected.endswith("name, clip_low, clip_high")
    source = {"id": "m", "algorithm": {"name": "grpo", "length_penalty": {"name": "overlong", "limit": 0, "cache": 1}}}
    problem = only({"env": {"train": [source]}})
    assert (problem.key, problem.expected) == ("env.train.0.algorithm.length_penalty.limit", "at least 1")


def test_a_section_without_its_variant_lists_them():
    assert only({"algorithm": {"std": True}}) == ConfigProblem(
        "algorithm.name",
        None,
        "one of grpo, max_rl, rloo, reinforce_pp, rae, hierarchical_grpo, opd, opsd, sft, custom",
    )


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"seq_len": "long"}, "a whole number"),
        ({"seq_len": 0}, "at least 1"),
        ({"optimizer": {"name": "adamw", "lr": "fast"}}, "a number"),
        ({"optimizer": {"name": "adamw", "max_grad_norm": 0}}, "more than 0.0"),
        ({"env": {"error_budget": 1.5}}, "at most 1.0"),
        ({"trainer": {"compile": "maybe"}}, "true or false"),
        ({"run": {"output_dir": True}}, "text"),
        ({"run": {"name": "a b"}}, "text that matches ^[A-Za-z0-9][A-Za-z0-9._+-]*$"),
        ({"env": {"train": {}}}, "a list"),
        ({"orchestrator": 3}, "a mapping"),
        ({"orchestrator": {"max_inflight": "many"}}, "a whole number, or auto"),
        ({"orchestrator": {"max_inflight": 0}}, "at least 1, or auto"),
        ({"env": {"train": [{}]}}, "a value, it has no default"),
    ],
)
def test_expectation_is_told_in_words(raw, expected):
    assert only(raw).expected == expected


def test_empty_configuration_is_valid_and_survives_its_dictionary():
    config = parse({})
    assert config == RunConfig()
    assert parse(to_dict(config)) == config


def test_free_form_sections_take_any_key():
    config = parse({"inference": {"vllm": {"max_model_len": 64}}, "env": {"train": [{"id": "m", "args": {"x": [1]}}]}})
    assert config.inference.vllm == {"max_model_len": 64}
    assert config.env.train[0].args == {"x": [1]}


def test_paths_of_what_exists_become_absolute(tmp_path):
    for folder in ("model", "org/image"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("rows.jsonl", "token", "image.sif"):
        (tmp_path / file).touch()
    raw = {
        "model": {"path": "../" + tmp_path.name + "/model", "tokenizer": "Org/absent"},
        "frozen": {"teacher": {"path": "model"}},
        "trainer": {"sft": {"data": "rows.jsonl"}, "replay": {"rollouts": ""}},
        "inference": {"attach": {"run": "model", "token_file": "token"}},
        "env": {"train": [{"id": "m", "runtime": {"image": "image.sif"}}]},
        "cluster": {"container": {"image": "org/image"}, "python": "python3"},
    }
    config = parse(raw, tmp_path)
    assert (config.model.path, config.model.tokenizer) == (f"{tmp_path}/model", "Org/absent")
    assert config.frozen["teacher"].path == f"{tmp_path}/model"
    assert (config.trainer.sft.data[0].path, config.trainer.replay.rollouts) == (f"{tmp_path}/rows.jsonl", "")
    attach = config.inference.attach
    assert (attach.run, attach.token_file) == (f"{tmp_path}/model", f"{tmp_path}/token")
    assert config.env.train[0].runtime.image == f"{tmp_path}/image.sif"
    assert (config.cluster.container.image, config.cluster.python) == ("org/image", "python3"), "no files, but names"
    assert parse(raw).model.path == raw["model"]["path"], "a role takes paths as they are"


def test_known_keys_of_a_section():
    assert known_keys(("checkpoint",)) == ["every", "keep_last", "keep_every"]
    assert "id" in known_keys(("env", "train", 0))
    assert known_keys(("inference", "vllm")) == []


def sections(cls: type) -> typing.Iterator[type]:
    yield cls
    for hint in typing.get_type_hints(cls).values():
        for part in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(part):
                yield from sections(part)


@pytest.mark.parametrize("section", sorted(set(sections(RunConfig)), key=lambda s: s.__name__))
def test_every_section_forbids_unknown_keys(section):
    assert section.__pydantic_config__["extra"] == "forbid"
    assert section.__doc__


def test_a_number_is_taken_for_text_where_text_is_wanted():
    config = parse({"resume": 5, "run": {"name": 123}, "cluster": {"memory": 0, "env": {"DEBUG": 1}}})
    assert (config.resume, config.run.name) == ("5", "123")
    assert (config.cluster.memory, config.cluster.env) == ("0", {"DEBUG": "1"})
    assert only({"cluster": {"time": 86400}}).expected.startswith("text in quotes"), "YAML reads 24:00:00 as this"


@pytest.mark.parametrize("key", ["ratio", "ratio_schedule", "order", "algorithm", "group_size"])
def test_evaluation_sources_have_no_keys_of_training(key: str) -> None:
    (problem,) = find_schema_problems({"env": {"eval": {"sources": [{"id": "words", key: 2}]}}})
    assert problem.key == f"env.eval.sources.0.{key}" and "rollouts_per_task" in problem.expected
