"""The fake engine keeps the protocol of the real one: stamps, pauses, verified weights, and faults on demand."""

import asyncio
import binascii
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from renderers.client import parse_generate_response
from safetensors.numpy import save_file

from prime_hpc.config.inference import InferenceConfig
from prime_hpc.config.run import RunConfig
from prime_hpc.config.sections import ModelConfig
from prime_hpc.errors import InferenceFailure
from prime_hpc.inference.engine import Piece, PolicyEngine
from prime_hpc.inference.protocol import Completion, GenerateRequest, LoadRequest, PauseRequest
from prime_hpc.inference.receive import required_shapes
from prime_hpc.inference.stamps import SpanTracker, StampLog
from prime_hpc.models.tiny import SPECIAL_TOKENS, make_char_tokenizer
from prime_hpc.plan.run_plan import Fork
from prime_hpc.transport.messages import PolicyVersion
from prime_hpc.transport.stamps import Stamp, checksum
from prime_hpc.transport.weights import seal
from tests.fake_engine.engine import EXIT_CODE, FakeEngine
from tests.fake_engine.policy import FakeOptions, Policy
from tests.fake_engine.process import EngineProcess
from tests.warm import start_warm

USER, ASSISTANT, EOS = 1, 2, 3
START_S = 20.0
Maker = Callable[..., EngineProcess]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Maker]:
    """Makes a ready fake engine from options and, if wanted, forks of the plan."""
    make_char_tokenizer(tmp_path / "model")
    started: list[EngineProcess] = []

    def make(forks: list[Fork] | None = None, **options: Any) -> EngineProcess:
        inference = InferenceConfig(engine="tests.fake_engine", engine_args=options, start_timeout_s=START_S)
        config = RunConfig(seq_len=64, model=ModelConfig(path=str(tmp_path / "model")), inference=inference)
        process = EngineProcess(tmp_path / "run", config, forks=forks, start=start_warm).__enter__()
        started.append(process)
        process.ready = process.wait_ready()
        return process

    yield make
    for process in started:
        process.__exit__()


def letters(text: str) -> list[int]:
    return [len(SPECIAL_TOKENS) + ord(c) - ord("a") for c in text]


def prompt(text: str) -> list[int]:
    return [USER, *letters(text), ASSISTANT]


def make_weights(directory: Path, version: PolicyVersion) -> Path:
    directory.mkdir(parents=True)
    save_file({"a": np.zeros(3, np.float32), "b": np.ones(2, np.float32)}, directory / "model.safetensors")
    seal(directory, version, "float32")
    return directory


def test_experts_are_sent_as_the_rollout_client_reads_them(engine: Maker) -> None:
    """All tokens from the one asked for, but the last, which is never computed."""
    process = engine(routing=[3, 300, 2])
    body = {"token_ids": prompt("abcd"), "sampling_params": {"routed_experts_prompt_start": 2}}
    payload = parse_generate_response(process.post("/inference/v1/generate", body).content)
    [choice] = payload["choices"]
    sent = choice["routed_experts"]
    rows = len(body["token_ids"]) - 2 + len(choice["token_ids"]) - 1
    assert (sent["shape"], sent["start"], sent["dtype"]) == ([rows, 3, 2], 2, "uint16")
    experts = np.frombuffer(binascii.a2b_base64(sent["data"]), "<u2").reshape(sent["shape"])
    assert 255 < experts.max() < 300


def test_a_skilled_policy_reverses_and_is_stamped(engine: Maker) -> None:
    process = engine(skill0=1.0)
    choice = process.generate(prompt("abcd"), session="one")
    assert choice["token_ids"] == [*letters("dcba"), EOS]
    assert choice["finish_reason"] == "stop"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in choice["token_ids"]]
    assert all(entry["logprob"] < 0 for entry in choice["logprobs"]["content"])
    (stamp,) = process.stamps("one")
    assert (stamp["tokens"], stamp["spans"], stamp["crc"]) == (5, [["0.0", 0, 5]], checksum(choice["token_ids"]))
    assert process.stamps("two") == []


def test_max_tokens_cuts_a_reply(engine: Maker) -> None:
    choice = engine(skill0=1.0).generate(prompt("abcd"), max_tokens=2)
    assert (choice["token_ids"], choice["finish_reason"]) == (letters("dc"), "length")


def test_an_unskilled_policy_is_wrong_and_repeatable(engine: Maker) -> None:
    process = engine(skill0=0.0, skill_per_version=0.0)
    replies = [process.generate(prompt("abcd"))["token_ids"] for _ in range(8)]
    assert all(len(reply) == 5 and reply != [*letters("dcba"), EOS] for reply in replies)
    assert len({tuple(reply) for reply in replies}) > 1


def test_skill_grows_with_the_loaded_version(engine: Maker, tmp_path: Path) -> None:
    process = engine(skill0=0.0, skill_per_version=0.5)
    directory = make_weights(tmp_path / "weights", PolicyVersion(0, 2))
    reply = process.post("/prime_hpc/load", {"version": "0.2", "path": str(directory)}).json()
    assert (reply["version"], [ack["n_tensors"] for ack in reply["workers"]]) == ("0.2", [2])
    assert (process.paths.rendezvous / "acks" / "inference-0.rank0.json").exists()
    assert process.state()["version"] == "0.2"
    assert process.generate(prompt("xyz"))["token_ids"] == [*letters("zyx"), EOS]
    assert process.stamps("s")[-1]["spans"] == [["0.2", 0, 4]]


def test_a_request_spans_an_update(engine: Maker, tmp_path: Path) -> None:
    process = engine(skill0=1.0, token_s=0.05)
    directory = make_weights(tmp_path / "weights", PolicyVersion(0, 1))
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(process.generate(prompt("abcdefghijklmnopqrst"))))
    thread.start()
    time.sleep(0.5)
    assert process.post("/prime_hpc/pause", {"kv": "keep"}).json()["paused"] is True
    assert process.post("/prime_hpc/load", {"version": "0.1", "path": str(directory)}).status_code == 200
    time.sleep(0.3)
    assert (answers, process.state()["running"]) == ([], 1)
    assert process.post("/prime_hpc/resume").json()["paused"] is False
    thread.join()
    (first, begin, cut), (second, cut_again, end) = process.stamps("s")[0]["spans"]
    assert (first, begin, second, end) == ("0.0", 0, "0.1", 21)
    assert 0 < cut == cut_again < 21


def test_corrupt_weights_are_refused(engine: Maker, tmp_path: Path) -> None:
    process = engine()
    directory = make_weights(tmp_path / "weights", PolicyVersion(0, 1))
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    for path in (directory, tmp_path / "absent"):
        reply = process.post("/prime_hpc/load", {"version": "0.1", "path": str(path)})
        assert (reply.status_code, reply.json()["type"]) == (422, "CorruptData")
    assert (process.state()["version"], process.state()["paused"]) == ("0.0", False)


def test_weights_of_another_version_are_refused(engine: Maker, tmp_path: Path) -> None:
    directory = make_weights(tmp_path / "weights", PolicyVersion(0, 1))
    reply = engine().post("/prime_hpc/load", {"version": "0.2", "path": str(directory)})
    assert (reply.status_code, reply.json()["type"]) == (422, "CorruptData")
    assert "0.1, not 0.2" in reply.json()["error"]


def test_only_the_token_opens_routes(engine: Maker) -> None:
    process = engine()
    stranger = httpx.Client(base_url=process.ready["base_url"], headers={"Authorization": "Bearer no"})
    assert [stranger.get(route).status_code for route in ("/health", "/metrics", "/version")] == [200, 200, 200]
    assert [stranger.get(route).status_code for route in ("/prime_hpc/state", "/v1/models")] == [401, 401]
    assert stranger.post("/inference/v1/generate", json={"token_ids": [1]}).status_code == 401


BAD_REQUESTS: list[dict[str, Any]] = [
    {"token_ids": []},
    {"token_ids": list(range(4, 30)) * 3},
    {"token_ids": [10**6]},
    {"token_ids": "text"},
    {"token_ids": [4], "sampling_params": {"n": 2}},
    {"token_ids": [4], "model": "another"},
]


def test_bad_requests_are_refused(engine: Maker) -> None:
    process = engine()
    replies = [process.post("/inference/v1/generate", body) for body in BAD_REQUESTS]
    assert [reply.status_code for reply in replies] == [400] * len(BAD_REQUESTS)
    assert all(sorted(reply.json()) == ["error", "type"] for reply in replies)


def test_a_lost_client_frees_its_request(engine: Maker) -> None:
    process = engine(faults={"hang": 1})
    body, session = {"token_ids": [4]}, {"X-Session-ID": "lost"}
    with pytest.raises(httpx.ReadTimeout):
        process.client.post("/inference/v1/generate", json=body, headers=session, timeout=0.3)
    time.sleep(0.2)
    assert process.state()["running"] == 0
    assert process.stamps("lost") == []


def test_faults_strike_as_often_as_asked(engine: Maker) -> None:
    process = engine(skill0=1.0)
    body = {"token_ids": prompt("ab")}
    process.post("/fake/fault", {"kind": "error", "count": 2})
    assert [process.post("/inference/v1/generate", body).status_code for _ in range(3)] == [500, 500, 200]
    process.post("/fake/fault", {"kind": "drop_stamps", "count": 1})
    for _ in range(2):
        process.generate(prompt("ab"), session="dropped")
    assert len(process.stamps("dropped")) == 1
    assert process.post("/fake/fault", {"kind": "unheard"}).status_code == 400
    process.post("/fake/fault", {"kind": "exit"})
    with pytest.raises(httpx.RemoteProtocolError):
        process.post("/inference/v1/generate", body)
    assert process.process.wait(60) == EXIT_CODE


def test_the_first_version_is_on_the_newest_lineage(engine: Maker) -> None:
    process = engine(forks=[Fork(lineage=1, step=4), Fork(lineage=2, step=6)])
    assert (process.ready["version"], process.state()["version"]) == ("2.0", "2.0")


def test_it_leaves_quickly_on_sigterm_with_a_request_open(engine: Maker) -> None:
    process = engine(faults={"hang": 1})
    thread = threading.Thread(target=_ignore_errors, args=(process,))
    thread.start()
    time.sleep(0.3)
    begin = time.monotonic()
    process.process.terminate()
    assert process.process.wait(60) == 0
    assert time.monotonic() - begin < 3
    thread.join()


def _ignore_errors(process: EngineProcess) -> None:
    with pytest.raises((httpx.HTTPError, AssertionError)):
        process.generate([4])


def test_spans_merge_and_split() -> None:
    tracker = SpanTracker()
    for tokens, version in [(0, "0.0"), (2, "0.0"), (3, "0.0"), (3, "0.1"), (0, "0.1"), (7, "0.2")]:
        tracker.reach(tokens, version)
    assert tracker.spans == [("0.0", 0, 3), ("0.2", 3, 7)]


def test_the_stamp_log_forgets_the_oldest() -> None:
    log = StampLog(2)
    for i, session in enumerate("aab"):
        log.add(session, Stamp(request_id=str(i), tokens=0, crc=0, spans=[]))
    assert [[s.request_id for s in log.of(session)] for session in "abc"] == [["1"], ["2"], []]


class HalfLoaded(FakeEngine):
    """An engine whose workers verify weights and then fail to load them."""

    async def call_workers(self, method: str, *args: str) -> list[dict[str, Any]]:
        if method == "prime_hpc_load":
            return [{"error": "out of memory", "type": "OutOfMemoryError"}]
        return await super().call_workers(method, *args)


def test_an_engine_that_loaded_in_part_never_resumes(tmp_path: Path) -> None:
    make_char_tokenizer(tmp_path / "model")
    directory = make_weights(tmp_path / "weights", PolicyVersion(0, 1))

    async def update() -> PolicyEngine:
        engine = HalfLoaded(Policy(tmp_path / "model", FakeOptions()), FakeOptions(), max_model_len=64, seed=0)
        policy = PolicyEngine(engine, version=PolicyVersion(0, 0), model="policy", process="inference-0",
                              acks=tmp_path / "acks", stamps=StampLog(1))  # fmt: skip
        with pytest.raises(InferenceFailure, match="0.1 is loaded in part.*out of memory"):
            await policy.load(LoadRequest(version="0.1", path=str(directory)))
        with pytest.raises(InferenceFailure):
            await policy.resume()
        return policy

    policy = asyncio.run(update())
    assert policy.failure is not None
    assert (policy.state().version, policy.state().paused) == ("0.0", True)


class WholeReplies(FakeEngine):
    """An engine that hands over no token before the last."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.sampled: dict[str, int] = {}

    async def generate(self, request: GenerateRequest, request_id: str, salt: str) -> AsyncIterator[Piece]:
        pieces = []
        async for piece in super().generate(request, request_id, salt):
            pieces.append(piece)
            self.sampled[request_id] = len(pieces)
        del self.sampled[request_id]
        yield pieces[-1]._replace(token_ids=[token for piece in pieces for token in piece.token_ids],
                                  logprobs=[logprob for piece in pieces for logprob in piece.logprobs])  # fmt: skip

    async def pause(self, *, recompute: bool) -> dict[str, int]:
        await super().pause(recompute=recompute)
        return dict(self.sampled)


def test_tokens_that_are_held_back_are_stamped_when_the_version_changes(tmp_path: Path) -> None:
    make_char_tokenizer(tmp_path / "model")
    request = GenerateRequest(token_ids=[USER, *letters("abcdefghijklmnopqrst"), ASSISTANT])

    async def update() -> tuple[int, Completion, Completion]:
        engine = WholeReplies(Policy(tmp_path / "model", FakeOptions()), FakeOptions(token_s=0.005), max_model_len=64,
                              seed=0)  # fmt: skip
        policy = PolicyEngine(engine, version=PolicyVersion(0, 0), model="policy", process="inference-0",
                              acks=tmp_path / "acks", stamps=StampLog(1))  # fmt: skip
        reply = asyncio.ensure_future(policy.generate(request, "session"))
        while engine.sampled.get(next(iter(engine.sampled), ""), 0) < 3:
            await asyncio.sleep(0.001)
        await policy.pause(PauseRequest())
        (cut,) = engine.sampled.values()
        for step in (1, 2):
            directory = make_weights(tmp_path / f"weights{step}", PolicyVersion(0, step))
            await policy.load(LoadRequest(version=f"0.{step}", path=str(directory)))
        late = asyncio.ensure_future(policy.generate(request, "session"))
        await policy.resume()
        return cut, await reply, await late

    cut, reply, late = asyncio.run(update())
    assert len(reply.token_ids) == len(late.token_ids) == 21
    assert reply.spans == [("0.0", 0, cut), ("0.2", cut, 21)]
    assert late.spans == [("0.2", 0, 21)]


def test_required_tensors_leave_out_what_is_never_published(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true, "num_hidden_layers": 2}')
    names = ["model.embed_tokens.weight", "model.layers.1.a", "model.layers.2.a", "mtp.layers.0.a", "lm_head.weight"]
    save_file({name: np.zeros((2, 3), np.float32) for name in names}, tmp_path / "model.safetensors")
    assert required_shapes(tmp_path) == {"model.embed_tokens.weight": [2, 3], "model.layers.1.a": [2, 3]}
