"""Batches over ZMQ and over files: asked, answered, repeated, never lost; keys are needed to talk."""

import asyncio
import contextlib
import logging
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from prime_hpc.cluster import secrets
from prime_hpc.cluster.beats import Heart
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.rendezvous import Rendezvous
from prime_hpc.config.run import RunConfig
from prime_hpc.errors import DeadlineExceeded, SchemaMismatch
from prime_hpc.transport import batches, sockets
from prime_hpc.transport.messages import BatchRequest, RankBatch, StepReport, decode, encode


def make_role(run_dir: Path, name: str, transport: str, timeout_s: float = 20.0) -> SimpleNamespace:
    config = RunConfig()
    config.orchestrator.transport = transport
    config.trainer.batch_timeout_s = timeout_s
    config.cluster.start_timeout_s = timeout_s
    paths = RunPaths(run_dir)
    return SimpleNamespace(
        config=config, paths=paths, secrets=secrets.load(run_dir), rendezvous=Rendezvous(paths.rendezvous, name, 1),
        process=SimpleNamespace(name=name), bind_host="127.0.0.1", advertised_host="127.0.0.1",
        log=logging.getLogger(name), heart=Heart(paths.rendezvous, name, 1, 0, 1.0),
    )  # fmt: skip


class Server:
    """The orchestrator's end on a thread of its own; batches become available when the test says so."""

    def __init__(self, run_dir: Path, transport: str):
        self.requests: list[BatchRequest] = []
        self.available = threading.Event()
        self._role = make_role(run_dir, "orchestrator-0", transport)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> "Server":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        server = batches.open_server(self._role)
        self._role.rendezvous.publish("sampling", batch_address=server.address)
        with contextlib.suppress(asyncio.CancelledError):  # how a test ends it
            await server.serve(self._answer)

    async def _answer(self, request: BatchRequest) -> RankBatch:
        self.requests.append(request)
        while not self.available.is_set():
            await asyncio.sleep(0.01)
        return RankBatch(step=request.step, rank=request.rank, micro_batches=[], sample_ids=["s"], journal_offset=7)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    secrets.create(tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("transport", ["zmq", "files"])
def test_two_ranks_get_the_batch_they_wait_for_and_hand_over_reports(run_dir: Path, transport: str) -> None:
    with Server(run_dir, transport) as server:
        sources = [batches.open_source(make_role(run_dir, f"trainer-{r}", transport), r, 2) for r in (0, 1)]
        threading.Timer(0.3, server.available.set).start()
        got = [source.receive(1, None, 0) for source in sources]
        report = StepReport(step=1, metrics={"loss": 0.25})
        sources[0].receive(2, report, checkpointed=1)
        assert [(b.step, b.rank, b.journal_offset) for b in got] == [(1, 0, 7), (1, 1, 7)]
    (asked,) = [r for r in server.requests if r.step == 2]
    assert asked.report == report and asked.checkpointed == 1 and asked.world == 2


def test_a_question_is_repeated_until_it_is_answered(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "REPEAT_S", 0.1)
    with Server(run_dir, "zmq") as server:
        source = batches.open_source(make_role(run_dir, "trainer-0", "zmq"), 0, 1)
        threading.Timer(0.5, server.available.set).start()
        assert source.receive(3, None, 0).step == 3
        assert source.receive(4, None, 0).step == 4, "late answers to repeated questions are skipped"
    assert sum(r.step == 3 for r in server.requests) > 1


@pytest.mark.parametrize("transport", ["zmq", "files"])
def test_a_wait_has_a_deadline_and_names_who_was_waited_for(run_dir: Path, transport: str) -> None:
    with Server(run_dir, transport):
        source = batches.open_source(make_role(run_dir, "trainer-0", transport, timeout_s=0.3), 0, 1)
        with pytest.raises(DeadlineExceeded, match="trainer-0 waited 0 s for batch 1 from orchestrator-0"):
            source.receive(1, None, 0)


def test_without_the_run_s_key_nothing_gets_through(run_dir: Path, tmp_path: Path) -> None:
    with Server(run_dir, "zmq") as server:
        role = make_role(run_dir, "trainer-0", "zmq")
        address = role.rendezvous.wait("orchestrator-0", "batch_address", 10)
        stranger = sockets.dealer(zmq.Context.instance(), secrets.create(tmp_path / "other"), address, "stranger")
        stranger.send_multipart(encode(BatchRequest(rank=0, world=1, step=1, checkpointed=0)))
        assert not stranger.poll(500)
        stranger.close(0)
    assert not server.requests


def test_an_unknown_schema_version_is_named() -> None:
    with pytest.raises(SchemaMismatch, match="peer speaks message schema '999', this process speaks 1"):
        decode([b"999", b""])
