"""Sampling parameters of a source: what is refused at launch, and what an engine is asked for."""

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest

from prime_hpc.config import vllm_arguments
from prime_hpc.config.algorithm import OPD
from prime_hpc.config.checks import find_conflicts
from prime_hpc.config.env import EvalSourceConfig, SamplingConfig, SourceConfig
from prime_hpc.config.frozen import FrozenModel
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import find_schema_problems
from prime_hpc.config.sections import ModelConfig
from prime_hpc.models.tiny import make_char_tokenizer
from prime_hpc.orchestrator.runner import request_sampling
from tests.integration.scripted_engine import ScriptedEngine

SOURCE = """
class RequestOutputKind:
    DELTA: int = 1

class SamplingParams(PydanticMsgspecMixin):
    n: int = 1
    top_k: int = 0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    structured_outputs: StructuredOutputsParams | None = None
    _eos_token_id: int | None = None
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sampling_params.py").write_text(SOURCE)
    monkeypatch.setattr(vllm_arguments, "_folder", lambda: tmp_path)


def wrong(prefix: str, train: SamplingConfig, evaluate: SamplingConfig | None = None) -> list[str]:
    config = RunConfig()
    config.env.train = [SourceConfig(id="words", sampling=train)]
    config.env.eval.sources = [EvalSourceConfig(id="words", name="held_out", sampling=evaluate or SamplingConfig())]
    return [str(problem) for problem in find_conflicts(config) if problem.key.startswith(prefix)]


@pytest.mark.usefixtures("vllm")
def test_extra_parameters_are_vllm_s_and_no_other_key_s() -> None:
    key = "env.eval.sources.0.sampling"
    extra = {"presence_penalty": 1.5, "min_token": 4, "top_k": 2, "n": 3, "structured_outputs": {}}
    assert wrong("env", SamplingConfig(), SamplingConfig(extra=extra)) == [
        f"{key}.extra.min_token = 4: expected a parameter of vLLM's SamplingParams; did you mean 'min_tokens'?",
        f"{key}.extra.top_k = 2: expected to be left out: {key}.top_k says it",
        f"{key}.extra.n = 3: expected to be left out: it is set for every request",
        f"{key}.extra.structured_outputs = {{}}: expected a parameter of vLLM's SamplingParams",
    ]
    assert wrong("env.train", SamplingConfig(extra={"min_token": 4})) != []


def test_the_vllm_of_this_machine_has_the_parameters() -> None:
    if find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    assert {"min_tokens", "presence_penalty", "ignore_eos"} <= {*vllm_arguments.sampling_parameters(RunConfig())}


def test_training_needs_chance() -> None:
    assert wrong("env.train", SamplingConfig(temperature=0, top_k=1, max_tokens=9999)) == [
        "env.train.0.sampling.temperature = 0: expected more than 0, since a policy gradient needs sampling",
        "env.train.0.sampling.top_k = 1: expected more than 1, since a policy gradient needs sampling",
        "env.train.0.sampling.max_tokens = 9999: expected less than seq_len = 2048, which holds the prompt too",
    ]
    assert wrong("env", SamplingConfig(), SamplingConfig(temperature=0, top_k=1)) == []


@pytest.mark.parametrize("sampling", [{"top_k": 20}, {"min_p": 0.1}, {"extra": {"repetition_penalty": 1.1}}])
def test_a_reference_scores_the_whole_distribution(sampling: dict) -> None:
    config = RunConfig(algorithm=OPD(teacher="big"), frozen={"big": FrozenModel(base_url="http://a", model="m")})
    config.env.train = [SourceConfig(id="words", sampling=SamplingConfig(stop=["x"], seed=3))]
    assert not [p for p in find_conflicts(config) if p.key.startswith("algorithm")]
    config.env.train = [SourceConfig(id="words", sampling=SamplingConfig(**sampling))]
    assert [p.key for p in find_conflicts(config) if p.key.startswith("algorithm")] == ["algorithm.name"]


def test_ranges_are_checked() -> None:
    sampling = {"top_k": 0, "min_p": 1.5, "stop": "x", "seeds": 1}
    raw = {"env": {"train": [{"id": "words", "sampling": sampling}]}}
    assert [str(p).partition("sampling.")[2] for p in find_schema_problems(raw)] == [
        "top_k = 0: expected at least 1",
        "min_p = 1.5: expected at most 1.0",
        "stop = 'x': expected a list",
        "seeds = 1: expected no such key; known here: temperature, top_p, top_k, min_p, max_tokens, stop, seed, extra; "
        "did you mean 'seed'?",
    ]


def test_a_request_says_what_is_set_and_nothing_else() -> None:
    assert request_sampling(SamplingConfig(), 0, "0") == {"temperature": 1.0, "top_p": 1.0}
    given = SamplingConfig(temperature=0.5, top_k=20, min_p=0.0, stop=["x"], max_tokens=7, extra={"min_tokens": 2})
    assert request_sampling(given, 0, "0") == {"temperature": 0.5, "top_p": 1.0, "top_k": 20, "min_p": 0.0,
                                               "stop": ["x"], "max_tokens": 7, "min_tokens": 2}  # fmt: skip


def test_each_rollout_has_a_seed_of_its_own_that_comes_again() -> None:
    seeds = [request_sampling(SamplingConfig(seed=7), task, number)["seed"] for task in (0, 1) for number in "01"]
    assert len({*seeds}) == 4
    assert request_sampling(SamplingConfig(seed=7), 1, "1")["seed"] == seeds[-1]


def test_the_parameters_reach_the_engine(tmp_path: Path) -> None:
    from prime_hpc.envs.environment import Environment, offer_token
    from prime_hpc.transport.messages import PolicyVersion, RunRollout, decode, encode

    make_char_tokenizer(tmp_path)
    source = SourceConfig(id="prime_hpc.envs.reverse_text", args={"num_tasks": 1, "alphabet": "abcd"})
    given = {"top_k": 20, "min_p": 0.1, "stop": ["x", "y"], "seed": 5, "min_tokens": 2}
    offer_token("t")

    async def play() -> None:
        environment = Environment("words", source, ModelConfig(path=str(tmp_path)))
        request = RunRollout(rollout_id="r", task_index=0, base_url=engine.base_url, model="policy",
                             version=PolicyVersion(0, 0), sampling=given)  # fmt: skip
        async with environment.serving():
            await environment.run(decode(encode(request)))

    with ScriptedEngine("t") as engine:
        asyncio.run(play())
    assert engine.sampling[0].items() >= given.items()
