"""A real vLLM engine on a tiny random Qwen3: what it samples, what it stamps, and which weights it samples from."""

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from prime_hpc.config.inference import InferenceConfig
from prime_hpc.config.run import RunConfig
from prime_hpc.config.sections import ModelConfig
from prime_hpc.config.vllm_arguments import find_unknown_arguments
from prime_hpc.errors import ConfigurationError
from prime_hpc.inference import arguments, parsers
from prime_hpc.models.tiny import LETTERS, SPECIAL_TOKENS, make_tiny_model
from prime_hpc.transport.messages import PolicyVersion
from prime_hpc.transport.stamps import checksum
from prime_hpc.transport.weights import seal
from tests.fake_engine.process import EngineProcess
from tests.models_support import greedy

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

SEQ_LEN = 256
PROMPT = [1, 9, 4, 17, 22, 2]
TOLERANCE = 1e-5
LEAVE_S = 60.0
ENDLESS = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 200}
Models = dict[str, torch.nn.Module]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Models]:
    """Two policies, by version: 0.0 in `base`, and 0.1 and 0.2 as published weights of other seeds."""
    torch.set_num_threads(1)  # the engine needs the other cores
    root = tmp_path_factory.mktemp("policies")
    policies = {"0.0": make_tiny_model(root / "base", seed=0)}
    for step in (1, 2):
        version = PolicyVersion(0, step)
        policies[str(version)] = make_tiny_model(root / f"v{version}", seed=step)
        seal(root / f"v{version}", version, "float32")
    return root, {version: model.eval() for version, model in policies.items()}


@pytest.fixture(scope="module")
def server(models: tuple[Path, Models], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One engine for all tests of this file; it must leave whole and without litter."""
    config = RunConfig(seq_len=SEQ_LEN, model=ModelConfig(path=str(models[0] / "base")),
                       inference=InferenceConfig(start_timeout_s=240))  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIME_HPC_HOME", str(tmp_path_factory.mktemp("home")))
        engine = EngineProcess(tmp_path_factory.mktemp("vllm") / "run", config).__enter__()
    try:
        engine.wait_ready()
        yield engine
        children = psutil.Process(engine.process.pid).children(recursive=True)
        shared = shared_memory([engine.process.pid, *(p.pid for p in children)])
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(LEAVE_S) == 0
        _, orphans = psutil.wait_procs(children, timeout=LEAVE_S)
        assert [p for p in orphans if p.status() != psutil.STATUS_ZOMBIE] == []
        assert [path for path in shared if path.exists()] == []
    finally:
        engine.__exit__()


def shared_memory(pids: list[int]) -> set[Path]:
    """Files of /dev/shm that the processes have mapped."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return {Path(line.split()[-1]) for line in maps.splitlines() if "/dev/shm/" in line}


def load(server: EngineProcess, root: Path, version: str) -> httpx.Response:
    return server.post("/prime_hpc/load", {"version": version, "path": str(root / f"v{version}")})


@pytest.fixture
def restored(server: EngineProcess, models: tuple[Path, Models]) -> Iterator[EngineProcess]:
    """The engine, serving 0.1 at first."""
    assert load(server, models[0], "0.1").status_code == 200
    yield server


def logprobs_of(model: torch.nn.Module, choice: dict[str, Any], temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of each completion token under `model` from one full forward pass, f32[n]."""
    ids = torch.tensor([PROMPT + choice["token_ids"]])
    with torch.no_grad():
        logits = model(ids).logits.float()[0, len(PROMPT) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(PROMPT) :, None])[:, 0]


def sampled_logprobs(choice: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])


def update_in_flight(server: EngineProcess, root: Path, versions: list[str], kv: str, requests: int,
                     session: str) -> list[dict[str, Any]]:  # fmt: skip
    """Completions of `requests` that run while the engine takes each of `versions`."""
    with ThreadPoolExecutor(requests) as pool:
        futures = [pool.submit(server.generate, PROMPT, f"{session}{i}", **ENDLESS) for i in range(requests)]
        while server.state()["running"] < requests:
            time.sleep(0.01)
        for version in versions:
            time.sleep(0.15)
            assert server.post("/prime_hpc/pause", {"kv": kv}).json()["paused"] is True
            assert load(server, root, version).json()["version"] == version
            assert server.post("/prime_hpc/resume").json()["paused"] is False
        return [future.result() for future in futures]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampled_distribution(
    restored: EngineProcess, models: tuple[Path, Models], temperature: float
) -> None:
    choice = restored.generate(PROMPT, temperature=temperature, ignore_eos=True, max_tokens=64)
    assert len(choice["token_ids"]) == 64
    expected = logprobs_of(models[1]["0.1"], choice, temperature)
    assert (sampled_logprobs(choice) - expected).abs().max() <= TOLERANCE


def test_a_reply_without_a_limit_fills_the_context(restored: EngineProcess) -> None:
    choice = restored.generate(PROMPT, ignore_eos=True)
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (SEQ_LEN - len(PROMPT), "length")


def test_a_stop_string_ends_a_reply(restored: EngineProcess) -> None:
    first = len(SPECIAL_TOKENS)
    letters = {"temperature": 0.0, "max_tokens": 16, "allowed_token_ids": [*range(first, first + len(LETTERS))]}
    whole = restored.generate(PROMPT, **letters)
    text = "".join(LETTERS[token - first] for token in whole["token_ids"])
    choice = restored.generate(PROMPT, stop=[text[:3]], **letters)
    assert (choice["token_ids"], choice["finish_reason"]) == (whole["token_ids"][:3], "stop")
    assert (sampled_logprobs(choice) - sampled_logprobs(whole)[:3]).abs().max() <= TOLERANCE


def test_new_weights_serve(restored: EngineProcess, models: tuple[Path, Models]) -> None:
    root, policies = models
    wanted = {version: greedy(policies[version], PROMPT, 16) for version in ("0.1", "0.2")}
    assert wanted["0.1"] != wanted["0.2"]
    n_tensors = len(policies["0.1"].state_dict())
    for version in ("0.2", "0.1", "0.2"):
        reply = load(restored, root, version).json()
        (ack,) = reply["workers"]
        assert (ack["version"], ack["digest"], ack["n_tensors"]) == (version, reply["digest"], n_tensors)
        choice = restored.generate(PROMPT, temperature=0.0, ignore_eos=True, max_tokens=16)
        assert choice["token_ids"] == wanted[version]
        assert restored.state()["version"] == version


def test_stamps_equal_the_engines_own(restored: EngineProcess, models: tuple[Path, Models]) -> None:
    choices = update_in_flight(restored, models[0], ["0.2", "0.1"], "recompute", 12, "stamp")
    for i, choice in enumerate(choices):
        (stamp,) = restored.stamps(f"stamp{i}")
        assert (stamp["tokens"], stamp["crc"]) == (200, checksum(choice["token_ids"]))
        assert stamp["spans"] == choice["weight_versions"]
        assert [version for version, _, _ in stamp["spans"]] == ["0.1", "0.2", "0.1"]


def test_recompute_makes_every_span_exact(restored: EngineProcess, models: tuple[Path, Models]) -> None:
    root, policies = models
    (choice,) = update_in_flight(restored, root, ["0.2"], "recompute", 1, "exact")
    spans = restored.stamps("exact0")[0]["spans"]
    assert [version for version, _, _ in spans] == ["0.1", "0.2"]
    for version, begin, end in spans:
        error = (sampled_logprobs(choice) - logprobs_of(policies[version], choice))[begin:end].abs().max()
        assert error <= TOLERANCE, version


def test_keep_goes_on_with_the_old_cache(restored: EngineProcess, models: tuple[Path, Models]) -> None:
    root, policies = models
    (choice,) = update_in_flight(restored, root, ["0.2"], "keep", 1, "keep")
    (_, _, cut), (version, _, end) = restored.stamps("keep0")[0]["spans"]
    assert (version, end) == ("0.2", 200)
    error = (sampled_logprobs(choice) - logprobs_of(policies["0.2"], choice))[cut:].abs().max()
    assert error > 100 * TOLERANCE
    fresh = restored.generate(PROMPT, temperature=1.0, ignore_eos=True, max_tokens=32)
    assert (sampled_logprobs(fresh) - logprobs_of(policies["0.2"], fresh)).abs().max() <= TOLERANCE


def test_requests_wait_while_it_is_paused(restored: EngineProcess) -> None:
    assert restored.post("/prime_hpc/pause").json()["paused"] is True
    answers: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda: answers.append(restored.generate(PROMPT, max_tokens=4)))
               for _ in range(3)]  # fmt: skip
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    assert (len(answers), restored.state()["running"]) == (0, 3)
    restored.post("/prime_hpc/resume")
    for thread in threads:
        thread.join(30)
    assert len(answers) == 3


def test_corrupt_weights_leave_the_old_ones(
    restored: EngineProcess, models: tuple[Path, Models], tmp_path: Path
) -> None:
    damaged = tmp_path / "v0.2"
    shutil.copytree(models[0] / "v0.2", damaged)
    with (damaged / "model.safetensors").open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(b"\x42" * 64)
    for path in (damaged, tmp_path / "absent"):
        reply = restored.post("/prime_hpc/load", {"version": "0.2", "path": str(path)})
        assert (reply.status_code, reply.json()["type"]) == (422, "CorruptData")
    assert (restored.state()["version"], restored.state()["paused"]) == ("0.1", False)
    choice = restored.generate(PROMPT, temperature=0.0, ignore_eos=True, max_tokens=16)
    assert choice["token_ids"] == greedy(models[1]["0.1"], PROMPT, 16)


@pytest.mark.parametrize("defect", ["missing", "reshaped"])
def test_incomplete_weights_leave_the_old_ones(
    restored: EngineProcess, models: tuple[Path, Models], tmp_path: Path, defect: str
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(models[0] / "v0.2" / "model.safetensors")
    tensors |= {name: tensors[name].T.contiguous()} if defect == "reshaped" else {}
    save_file({k: v for k, v in tensors.items() if defect == "reshaped" or k != name}, tmp_path / "a.safetensors")
    seal(tmp_path, PolicyVersion(0, 2), "float32")
    reply = restored.post("/prime_hpc/load", {"version": "0.2", "path": str(tmp_path)})
    assert (reply.status_code, reply.json()["type"]) == (422, "CorruptData")
    assert name in reply.json()["error"]
    choice = restored.generate(PROMPT, temperature=0.0, ignore_eos=True, max_tokens=16)
    assert choice["token_ids"] == greedy(models[1]["0.1"], PROMPT, 16)


def test_only_the_token_opens_routes(server: EngineProcess) -> None:
    stranger = httpx.Client(base_url=server.client.base_url, timeout=30)
    assert [stranger.get(route).status_code for route in ("/health", "/metrics", "/version")] == [200, 200, 200]
    assert [stranger.get(route).status_code for route in ("/prime_hpc/state", "/v1/models", "/docs")] == [401] * 3
    for route in ("/inference/v1/generate", "/prime_hpc/load", "/prime_hpc/pause", "/v1/chat/completions"):
        assert stranger.post(route, json={}).status_code == 401


@pytest.mark.parametrize("body", [
    {"token_ids": []},
    {"token_ids": [4] * (SEQ_LEN + 1)},
    {"token_ids": [10**6]},
    {"token_ids": [4], "sampling_params": {"top_p": 7}},
    {"token_ids": [4], "sampling_params": {"unheard": 1}},
    {"token_ids": [4], "sampling_params": {"n": 2}},
    {"token_ids": [4], "model": "another"},
    {},
])  # fmt: skip
def test_bad_requests_are_refused(server: EngineProcess, body: dict[str, Any]) -> None:
    reply = server.post("/inference/v1/generate", body)
    assert (reply.status_code, sorted(reply.json())) == (400, ["error", "type"])


def test_a_lost_client_aborts_its_request(restored: EngineProcess) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"ignore_eos": True}}
    with pytest.raises(httpx.ReadTimeout):
        restored.client.post("/inference/v1/generate", json=body, headers={"X-Session-ID": "lost"}, timeout=0.05)
    time.sleep(0.5)
    assert restored.state()["running"] == 0
    assert 'vllm:num_requests_running{engine="0",model_name="policy"} 0.0' in restored.get("/metrics").text
    assert restored.stamps("lost") == []


def test_renderers_client_understands_the_answers(restored: EngineProcess, models: tuple[Path, Models]) -> None:
    from openai import AsyncOpenAI
    from renderers import client as renderers_client
    from renderers import create_renderer
    from transformers import AutoTokenizer

    renderer = create_renderer(AutoTokenizer.from_pretrained(models[0] / "base"))

    async def ask() -> dict[str, Any]:
        base_url = f"{restored.client.base_url}/v1"
        async with AsyncOpenAI(base_url=base_url, api_key=restored.token, max_retries=0) as client:
            return await renderers_client.generate(
                client=client, renderer=renderer, model="policy", messages=[{"role": "user", "content": "abc"}],
                sampling_params={"max_tokens": 8, "temperature": 1.0}, cache_salt="0.1",
                extra_headers={"X-Session-ID": "renderers"})  # fmt: skip

    answer = asyncio.run(ask())
    (stamp,) = restored.stamps("renderers")
    assert answer["prompt_ids"] == [1, 4, 5, 6, 2]
    assert (stamp["request_id"], stamp["tokens"]) == (answer["request_id"], len(answer["completion_logprobs"]))
    assert stamp["crc"] == checksum(answer["completion_ids"])


def test_unknown_arguments_of_vllm_are_named_together() -> None:
    with pytest.raises(ConfigurationError) as caught:
        arguments.parse({"model": "m", "max_model_length": 4, "tensor_parallel": 2})
    assert [(p.key, p.nearest) for p in caught.value.problems] == [
        ("inference.vllm.max_model_length", "max_model_len"),
        ("inference.vllm.tensor_parallel", "tensor_parallel_size"),
    ]
    with pytest.raises(ConfigurationError, match="max-model-len"):
        arguments.parse({"model": "m", "max_model_len": "long"})


def test_every_argument_that_vllm_takes_is_found_in_its_source() -> None:
    taken = [name for name in vars(arguments.parse({"model": "m"})) if name != "model_tag"]  # which has no name
    assert len(taken) > 100
    config = RunConfig(inference=InferenceConfig(vllm=dict.fromkeys(taken)))
    assert list(find_unknown_arguments(config)) == []


def test_vllm_knows_every_parser_that_is_chosen() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert {f.parser for f in parsers.TOOL_CALLS} <= set(ToolParserManager.list_registered())
    assert {f.parser for f in parsers.REASONING} - {None} <= set(ReasoningParserManager.list_registered())
    args = arguments.parse({"model": "m", "tool_call_parser": "hermes", "enable_auto_tool_choice": True,
                            "kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
                            "kv_offloading_size": 2.5})  # fmt: skip
    assert (args.tool_call_parser, args.enable_auto_tool_choice, args.kv_offloading_size) == ("hermes", True, 2.5)
    assert args.kv_transfer_config.kv_connector == "OffloadingConnector"
