"""Real vLLM engines of two ranks, on one node and on two: each takes new weights, acknowledges and serves them."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from prime_hpc.cluster.files import read_json
from prime_hpc.config.inference import InferenceConfig
from prime_hpc.config.run import RunConfig
from prime_hpc.config.sections import ModelConfig
from prime_hpc.models.tiny import make_tiny_model
from prime_hpc.transport.messages import PolicyVersion
from prime_hpc.transport.weights import seal
from tests.fake_engine.process import EngineProcess
from tests.models_support import greedy
from tools.weights_rig import rig

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]

PROMPT = [1, 9, 4, 17, 22, 2]
TENSOR, DATA = {"tensor_parallel_size": 2}, {"data_parallel_size": 2}
KINDS = {"tensor": (TENSOR, 1), "data": (DATA, 1), "tensor on two nodes": (TENSOR, 2), "data on two nodes": (DATA, 2)}
ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
V1 = PolicyVersion(0, 1)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.replace(" ", "_"))
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineProcess]:
    """An engine of two ranks with the base model of `tmp_path`, which has a version 0.1 too."""
    make_tiny_model(tmp_path / "base", seed=0)
    parallel, nodes = KINDS[request.param]
    config = RunConfig(seq_len=64, model=ModelConfig(path=str(tmp_path / "base")),
                       inference=InferenceConfig(start_timeout_s=1200, vllm=parallel))  # fmt: skip
    with EngineProcess(tmp_path / "run", config, env=ENV, nodes=nodes) as process:
        yield process


@pytest.mark.parametrize("parallel", [TENSOR, DATA], ids=["tensor", "data"])
def test_streamed_weights_reach_every_rank(
    tmp_path: Path, tiny_model: Path, parallel: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    inference = {"vllm": parallel, "start_timeout_s": 1200}
    with rig(tmp_path / "run", tiny_model, replicas=1, inference=inference, transport="nccl", timeout_s=600) as made:

        async def follow() -> None:
            fleet = made.connect()
            await made.update(fleet, PolicyVersion(0, 0))
            await made.update(fleet, made.train(share=0.5))

        asyncio.run(follow())
        acks = [read_json(made.paths.acks / f"inference-0.rank{rank}.json") for rank in range(2)]
    assert [ack["version"] for ack in acks] == [str(V1)] * 2
    assert acks[0]["digest"] == acks[1]["digest"]


def test_every_rank_takes_acknowledges_and_serves_new_weights(engine: EngineProcess, tmp_path: Path) -> None:
    policy = make_tiny_model(tmp_path / "v0.1", seed=1).eval()
    manifest = seal(tmp_path / "v0.1", V1, "float32")
    engine.wait_ready()
    assert engine.state()["workers"] == 2
    reply = engine.post("/prime_hpc/load", {"version": str(V1), "path": str(tmp_path / "v0.1")}).json()
    assert [(ack["version"], ack["digest"]) for ack in reply["workers"]] == [(str(V1), manifest.digest)] * 2
    assert {path.name for path in (engine.paths.rendezvous / "acks").iterdir()} == {
        "inference-0.rank0.json", "inference-0.rank1.json"}  # fmt: skip
    wanted = greedy(policy, PROMPT, 8)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(engine.generate, PROMPT, f"s{i}", temperature=0.0, ignore_eos=True, max_tokens=8)
                 for i in range(16)]  # fmt: skip
        assert [future.result()["token_ids"] for future in asked] == [wanted] * 16
    if engine.config.inference.vllm == DATA:
        served = [line for line in engine.get("/metrics").text.splitlines()
                  if line.startswith("vllm:generation_tokens_total{")]  # fmt: skip
        assert len(served) == 2 and all(float(line.rpartition(" ")[2]) > 0 for line in served)
