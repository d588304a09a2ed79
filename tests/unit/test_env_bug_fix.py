"""Repositories with a mistake, and a scripted policy that mends one in a subprocess and where there is no Apptainer."""

import asyncio
import io
import json
import os
import shutil
import sys
import types
import unittest
from pathlib import Path

import pytest
import verifiers.v1 as vf

from prime_hpc.config.env import RuntimeConfig, SourceConfig
from prime_hpc.envs.bug_fix.repositories import KNOWN, Repository, repository
from prime_hpc.envs.chat import ChatHarness
from prime_hpc.errors import EnvironmentFailure
from tests.chat_server import Reply, play

VARIABLE = "PRIME_HPC_TEST_IMAGE"
IMAGE = os.environ.get(VARIABLE, "")
needs_podman = pytest.mark.skipif(not (IMAGE and shutil.which("podman")),
                                  reason=f"needs Podman, and an image with Python in {VARIABLE}")  # fmt: skip

APPTAINER = """#!/bin/sh
echo "$*" >> "{log}"
case "$1 $2" in
    "instance start") for bound; do case "$bound" in *:/app) echo "${{bound%:/app}}" > "{log}.app";; esac; done;;
    "exec --cleanenv") if [ "$5" = /app ]; then shift 6; cd "$(cat "{log}.app")" && exec "$@"; fi;;
esac
"""
"""Writes down how it is called, and runs what is to run in an instance beside it."""


def failing(made: Repository, code: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tests that fail where the module has this code."""
    name = made.module_path.removesuffix(".py")
    module, tests = types.ModuleType(name), types.ModuleType("tests")
    exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, name, module)
    exec(made.tests, tests.__dict__)
    suite = unittest.defaultTestLoader.loadTestsFromModule(tests)
    assert suite.countTestCases() == made.num_tests
    result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    return len(result.failures) + len(result.errors)


def test_tests_fail_for_every_mistake_and_pass_without(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [repository(number, 0) for number in range(150)]
    assert [m.module_path for m in made if not failing(m, m.module, monkeypatch)] == []
    assert [m.module_path for m in made if failing(m, m.right, monkeypatch)] == []
    assert len({m.module for m in made}) > 60 and made[7] == repository(7, 0) != repository(7, 1)
    drawn = {(m.module_path.partition("_")[2], right) for m in made for p in KNOWN for right, _ in p.mistakes
             if m.right.count(right) > m.module.count(right)}  # fmt: skip
    assert len(drawn) == sum(len(program.mistakes) for program in KNOWN), "every mistake is made"


def mending(made: Repository) -> Reply:
    """Looks, tries, spoils the tests, mends the module."""
    calls = [
        ("read_file", {"path": made.module_path}),
        ("run_command", {"command": f"python3 {made.test_path}"}),
        ("write_file", {"path": made.test_path, "text": ""}),
        ("read_file", {"path": "absent"}),
        ("write_file", {"path": made.module_path, "text": made.right}),
    ]

    def reply(messages: list[dict]) -> str | dict:
        done = sum(m["role"] == "tool" for m in messages)
        if done == len(calls):
            return "It passes."
        name, arguments = calls[done]
        call = {"name": name, "arguments": json.dumps(arguments)}
        return {"content": None, "tool_calls": [{"id": str(done), "type": "function", "function": call}]}

    return reply


def answers(source: SourceConfig, reply: Reply, reward: float) -> list[str]:
    """What the tools said in an episode of task 3, which has this reward."""
    episode = asyncio.run(play(source, reply, 3))
    assert episode.ok, episode.errors or episode.traces[0].errors
    [trace] = episode.traces
    assert trace.reward == reward
    return [m.content for m in trace.messages if m.role == "tool"]


def test_a_module_is_mended_beside_the_worker() -> None:
    made = repository(3, 0)
    source = SourceConfig(id="prime_hpc.envs.bug_fix", args={"command_s": 60})
    code, tried, written, absent, mended = answers(source, mending(made), 1.0)
    assert code == made.module and "FAILED" in tried and tried.endswith("exit status 1")
    assert written == mended == "written" and absent.startswith("error: read 'absent'")


def test_a_module_that_ends_the_tests_is_not_mended() -> None:
    made = repository(3, 0)
    cheat = Repository(made.module_path, "", "import os; os._exit(0)", made.test_path, made.tests)
    source = SourceConfig(id="prime_hpc.envs.bug_fix", args={"command_s": 60})
    answers(source, mending(cheat), 0.0)


def test_in_apptainer_every_command_has_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, program = tmp_path / "log", tmp_path / "apptainer"
    program.write_text(APPTAINER.format(log=log))
    program.chmod(0o755)
    image = tmp_path / "python.sif"
    image.touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin")
    runtime = RuntimeConfig(name="apptainer", image=str(image), options={"memory": 2, "cpu": 1})
    source = SourceConfig(id="prime_hpc.envs.bug_fix", args={"command_s": 45, "memory_mib": 900}, runtime=runtime)
    answers(source, mending(repository(3, 0)), 1.0)
    called = log.read_text()
    [started] = [line for line in called.splitlines() if line.startswith("instance start")]
    assert "--cleanenv --containall" in started and f"--cpus 1.0 --memory 2.0g {image}" in started
    limits = f"sh {900 * 1024} 45 sh -c python3 {repository(3, 0).test_path}"
    assert f'ulimit -v "$1"; shift; exec timeout -s KILL "$@" 2>&1 {limits}' in called
    assert called.splitlines()[-1].startswith("instance stop --force vf-")


def test_a_harness_in_the_worker_uses_addresses_as_they_are_whatever_its_runtime() -> None:
    runtime = types.SimpleNamespace(host_url=lambda url: f"http://127.0.0.1:1/inside/{url}")
    asyncio.run(ChatHarness(vf.HarnessConfig()).setup(runtime))
    assert runtime.host_url("http://127.0.0.1:80/v1") == "http://127.0.0.1:80/v1"


@pytest.mark.slow
@needs_podman
def test_in_a_real_container_a_module_is_mended() -> None:
    runtime = RuntimeConfig(name="podman", image=IMAGE, options={"memory": 1})
    source = SourceConfig(id="prime_hpc.envs.bug_fix", args={"command_s": 60}, runtime=runtime)
    _, tried, *_, mended = answers(source, mending(repository(3, 0)), 1.0)
    assert tried.endswith("exit status 1") and mended == "written"


@pytest.mark.slow
@needs_podman
@pytest.mark.parametrize(("command", "said"), [
    ("sleep 600", "exit status 137"),
    ("python3 -c 'bytes(10**9)'", "MemoryError"),
])  # fmt: skip
def test_in_a_real_container_a_command_has_its_limits(command: str, said: str) -> None:
    def reply(messages: list[dict]) -> str | dict:
        if messages[-1]["role"] == "tool":
            return "No."
        function = {"name": "run_command", "arguments": json.dumps({"command": command})}
        return {"content": None, "tool_calls": [{"id": "0", "type": "function", "function": function}]}

    source = SourceConfig(id="prime_hpc.envs.bug_fix", args={"command_s": 3, "memory_mib": 256},
                          runtime=RuntimeConfig(name="podman", image=IMAGE))  # fmt: skip
    [told] = answers(source, reply, 0.0)
    assert said in told


def test_a_missing_apptainer_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    source = SourceConfig(id="prime_hpc.envs.bug_fix", runtime=RuntimeConfig(name="apptainer"))
    with pytest.raises(EnvironmentFailure, match="no program 'apptainer' on this node; load its module"):
        asyncio.run(play(source, lambda _: ""))
