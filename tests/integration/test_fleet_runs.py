"""A fleet alone: people talk to it through its router, runs attach to it, and it stays when they end."""

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from prime_hpc.cluster import secrets
from prime_hpc.commands import chat
from tests.integration.runs import LocalRun

DEADLINE_S = 600.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[LocalRun]:
    """Two fake engines behind the built-in router, ready; nothing of them may be left at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIME_HPC_HOME", str(tmp_path_factory.mktemp("home")))
        run = LocalRun(tmp_path_factory.mktemp("outputs"), tiny_model, "fleet", "inference.replicas=2",
                       "inference.engine_args={skill0: 0.4, skill_per_version: 0.01}", experiment="serve")  # fmt: skip
        try:
            until(lambda: len(table(run)) == 2 and all(row["in_rotation"] for row in table(run)), run)
            yield run
            assert run.process.poll() is None
        finally:
            run.process.terminate()
            text, _ = run.process.communicate(timeout=DEADLINE_S)
            assert not run.survivors(), text


@pytest.fixture(autouse=True)
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


def test_people_talk_to_it_through_the_router(
    fleet: LocalRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n/new\nhello\n"))
    assert chat.main([str(fleet.root)]) == 0
    first, *replies = capsys.readouterr().out.splitlines()
    assert first == f"policy at {fleet.record('router-0')['base_url']}"
    assert replies == ["cba", "olleh"]
    assert chat.main([str(fleet.root / "absent")]) == 2


def test_a_run_attaches_changes_the_weights_and_leaves_the_fleet_as_it_is(fleet: LocalRun, tiny_model: Path) -> None:
    pids = [fleet.record(f"inference-{i}")["pid"] for i in range(2)]
    run = LocalRun(fleet.root.parent, tiny_model, "attached", "max_steps=2", f"inference.attach.run={fleet.root}")
    code, text = run.wait(DEADLINE_S)
    assert code == 0, text
    assert run.reported == [1, 2] and not run.survivors()
    assert "inference" not in {p["component"] for p in json.loads((run.root / "plan.json").read_text())["processes"]}
    assert [row["version"] for row in table(fleet)] == ["0.2", "0.2"]
    assert [fleet.record(f"inference-{i}")["pid"] for i in range(2)] == pids
    claim = {"holder": "another run", "seconds": 1.0, "exclusive": True}
    headers = {"Authorization": f"Bearer {secrets.token_file(fleet.root).read_text()}"}
    for row in table(fleet):
        assert httpx.post(f"{row['url']}/prime_hpc/claim", json=claim, headers=headers).status_code == 200
