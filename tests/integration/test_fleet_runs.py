"""A fleet alone: people talk to it through its router, runs attach to it, and it stays when they end."""

import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from prime_hpc.cluster import secrets
from prime_hpc.commands import chat, status
from prime_hpc.observe.records import evaluations, read_records, record_path
from prime_hpc.observe.run_facts import read_run
from prime_hpc.observe.status import take_status
from tests.integration.runs import ForkedRun, LocalRun

DEADLINE_S = 600.0


@contextmanager
def serving(home: Path, output: Path, model: Path, *overrides: str) -> Iterator[LocalRun]:
    """A fleet of fake engines; nothing of it may be left at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIME_HPC_HOME", str(home))
        run = LocalRun(output, model, "fleet", *overrides, experiment="serve")
        try:
            yield run
            assert run.process.poll() is None
        finally:
            run.process.terminate()
            text, _ = run.process.communicate(timeout=DEADLINE_S)
            assert not run.survivors(), text


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[LocalRun]:
    """Two engines behind the built-in router, ready."""
    home, output = (tmp_path_factory.mktemp(name) for name in ("home", "outputs"))
    skill = "inference.engine_args={skill0: 0.4, skill_per_version: 0.01}"
    with serving(home, output, tiny_model, "inference.replicas=2", skill) as run:
        until(lambda: len(table(run)) == 2 and all(row["in_rotation"] for row in table(run)), run)
        yield run


@pytest.fixture
def same_home(fleet: LocalRun, isolated_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets are found where the fleet put them."""
    monkeypatch.setenv("PRIME_HPC_HOME", psutil.Process(fleet.process.pid).environ()["PRIME_HPC_HOME"])


def until(condition: Any, run: LocalRun) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert run.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)


def ask(run: LocalRun, process: str, route: str) -> Any:
    """The answer of a process of the fleet; nothing while it does not answer."""
    try:
        headers = {"Authorization": f"Bearer {secrets.token_file(run.root).read_text()}"}
        return httpx.get(run.record(process)["base_url"] + route, headers=headers, timeout=60).json()
    except (FileNotFoundError, KeyError, json.JSONDecodeError, httpx.TransportError):
        return None


def table(run: LocalRun) -> list[dict[str, Any]]:
    return ask(run, "router-0", "/router/engines") or []


@pytest.mark.usefixtures("same_home")
def test_people_talk_to_it_through_the_router(
    fleet: LocalRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n/new\nhello\n"))
    assert chat.main([str(fleet.root)]) == 0
    first, *replies = capsys.readouterr().out.splitlines()
    assert first == f"policy at {fleet.record('router-0')['base_url']}"
    assert replies == ["cba", "olleh"]
    assert chat.main([str(fleet.root / "absent")]) == 2
    assert take_status(read_run(fleet.root)).phase == "serving"
    assert status.main([str(fleet.root), "--endpoint"]) == 0
    router, model, token = (line.split() for line in capsys.readouterr().out.splitlines())
    assert router == ["router-0", fleet.record("router-0")["base_url"] + "/v1"] and model == ["model", "policy"]
    assert Path(token[1]).read_text() == secrets.token_file(fleet.root).read_text()


@pytest.mark.usefixtures("same_home")
def test_a_run_attaches_changes_the_weights_and_leaves_the_fleet_as_it_is(fleet: LocalRun, tiny_model: Path) -> None:
    pids = [fleet.record(f"inference-{i}")["pid"] for i in range(2)]
    run = ForkedRun(fleet.root.parent, tiny_model, "attached", "max_steps=2", f"inference.attach.run={fleet.root}")
    code, text = run.wait(DEADLINE_S)
    assert code == 0, text
    assert run.reported == [1, 2] and not run.survivors()
    assert "inference" not in {p["component"] for p in json.loads((run.root / "plan.json").read_text())["processes"]}
    assert [row["version"] for row in table(fleet)] == ["0.2", "0.2"]
    assert [fleet.record(f"inference-{i}")["pid"] for i in range(2)] == pids
    evaluated = ForkedRun(fleet.root.parent, tiny_model, "evaluated", f"inference.attach.run={fleet.root}",
                          "inference.attach.version=0.2", experiment="eval_reverse_text_cpu")  # fmt: skip
    code, text = evaluated.wait(DEADLINE_S)
    assert code == 0, text
    [row] = evaluated.metrics
    assert (row["step"], row["eval/held_out/version"], row["eval/held_out/mixed"]) == (0, 2, 0)
    reward = evaluated.summary["eval/held_out/reward"]
    assert row["eval/held_out/reward"] == row["eval/held_out/avg@4"] == reward
    assert f"evaluated held_out: reward {reward:.4g}, errors 0, avg@4 {reward:.4g}, pass@1 " in text
    records = list(read_records(record_path(evaluations(evaluated.root / "rollouts", "held_out"), 0)))
    assert len(records) == 256 and sum(record["reward"] for record in records) / 256 == pytest.approx(reward)
    claim = {"holder": "another run", "seconds": 1.0, "exclusive": True}
    headers = {"Authorization": f"Bearer {secrets.token_file(fleet.root).read_text()}"}
    for row in table(fleet):
        assert httpx.post(f"{row['url']}/prime_hpc/claim", json=claim, headers=headers).status_code == 200


@pytest.mark.skipif(find_spec("vllm_router_rs") is None, reason="vllm-router is not installed")
def test_the_router_of_vllm_follows_an_engine_that_is_started_again(
    tmp_path: Path, isolated_home: Path, tiny_model: Path
) -> None:
    with serving(isolated_home, tmp_path, tiny_model, "inference.router=vllm", "recovery.backoff_s=0.1") as run:
        until(lambda: ask(run, "router-0", "/v1/models"), run)
        before = run.record("inference-0")["base_url"]
        psutil.Process(run.record("inference-0")["pid"]).kill()
        until(lambda: (ask(run, "inference-0", "/prime_hpc/state") or {}).get("version") == "0.0", run)
        assert run.record("inference-0")["base_url"] != before
        until(lambda: ask(run, "router-0", "/v1/models"), run)
        assert httpx.get(run.record("router-0")["base_url"] + "/v1/models").status_code == 401
