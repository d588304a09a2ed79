"""Adapters in the configuration: what sources sample from, what engines are told, and what cannot work."""

import pytest

from prime_hpc.config.checks import find_conflicts, source_adapter
from prime_hpc.config.env import EnvConfig, SourceConfig
from prime_hpc.config.lora import LoRAConfig
from prime_hpc.config.optimizer import AdamW
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import find_schema_problems

SOURCES = [SourceConfig(id="json", name="first"), SourceConfig(id="json", name="second", adapter="b")]


def make_config(*, sources: list[SourceConfig] = SOURCES, mode: str = "rl", **lora: object) -> RunConfig:
    return RunConfig(mode=mode, lora=LoRAConfig(**lora), env=EnvConfig(train=sources))


def problems(config: RunConfig) -> dict[str, str]:
    keys = ("lora", "env.train.0.adapter", "env.train.1.adapter", "trainer.router", "optimizer")
    return {p.key: f"{p.value}: {p.expected}" for p in find_conflicts(config) if p.key.startswith(keys)}


def test_sources_sample_from_their_adapter_or_the_first():
    config = make_config(rank=4, adapters=["c", "b"])
    assert [source_adapter(config, source) for source in SOURCES] == ["c", "b"]
    assert config.lora.served == ["b", "c"]
    assert problems(config) == {}


@pytest.mark.parametrize("lora", [{"rank": 0}, {"rank": 4, "serve": "merged"}])
def test_engines_know_one_policy_where_no_adapter_is_served(lora):
    config = make_config(sources=SOURCES[:1], **lora)
    assert (config.lora.served, source_adapter(config, SOURCES[0])) == ([], "")


def test_what_adapters_cannot_do_is_named():
    assert problems(make_config(rank=4)) == {
        "env.train.1.adapter": "b: a name of lora.adapters, with lora.rank above 0"}  # fmt: skip
    assert problems(make_config(rank=4, adapters=["a", "b", "c"])) == {
        "lora.adapters": "c: an adapter that a training source names"}  # fmt: skip
    assert problems(make_config(rank=4, adapters=["a", "b"], serve="merged")) == {
        "lora.serve": "merged: adapter, since weights can hold only one of several adapters"}  # fmt: skip
    assert problems(make_config(rank=4, adapters=["a", "b"], mode="sft")) == {
        "lora.adapters": "['a', 'b']: one, since mode=sft has one stream of rows"}  # fmt: skip
    assert set(problems(make_config(sources=SOURCES[:1], rank=4, adapters=[]))) == {"lora.adapters"}
    assert set(problems(make_config(sources=SOURCES[:1], rank=1024))) == {"lora.rank"}
    config = make_config(sources=SOURCES[:1], rank=4)
    config.trainer.router_bias_rate = 0.1
    assert set(problems(config)) == {"trainer.router_bias_rate"}


def test_names_of_adapters_are_those_of_folders():
    [problem] = find_schema_problems({"lora": {"adapters": ["a/b"]}})
    assert problem.key == "lora.adapters.0"


def test_a_schedule_without_its_steps_is_named():
    config = make_config(sources=SOURCES[:1])
    config.optimizer = AdamW(schedule="wsd")
    assert problems(config) == {"optimizer.decay_steps": "0: steps of decay, since optimizer.schedule=wsd"}
