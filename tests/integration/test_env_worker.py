"""Real worker processes, with the test as their orchestrator and a scripted engine."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from prime_hpc.cluster import secrets
from prime_hpc.cluster.lease import LeaseKeeper
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.rendezvous import Rendezvous
from prime_hpc.config.schema import parse, to_dict
from prime_hpc.envs.watchdog import EXIT_BLOCKED
from prime_hpc.models.tiny import make_char_tokenizer
from prime_hpc.plan.run_plan import ProcessPlan, RunPlan
from prime_hpc.transport import sockets
from prime_hpc.transport.messages import (
    NOT_SAMPLED,
    CancelRollout,
    Message,
    PolicyVersion,
    RolloutDone,
    RunRollout,
    Sample,
    WorkerHello,
    decode,
    encode,
)
from tests.integration import scripted_engine as script
from tests.integration.zoo import MODES
from tests.warm import start_warm
from tools.forked import Process, start_afresh

WORKERS = ("env-reverse_text-0", "env-zoo-0", "env-zoo-1", "env-absent-0")
DEADLINE_S = 240.0

OLD, NEW = PolicyVersion(0, 0), PolicyVersion(0, 1)


def raw_config(model: Path) -> dict:
    return {
        "seq_len": 48,
        "model": {"path": str(model)},
        "env": {
            "rollouts_per_worker": 8,
            "scoring_timeout_s": 3,
            "train": [
                {"id": "prime_hpc.envs.reverse_text", "args": {"num_tasks": 32, "seed": 5, "alphabet": "abcd"}},
                {"id": "tests.integration.zoo"},
                {"id": "absent_environment", "name": "absent"},
            ],
        },
    }


class Orchestrator:
    """The other end of the workers' sockets."""

    def __init__(self, root: Path):
        self.paths = RunPaths(root)
        self.paths.rendezvous.mkdir(parents=True)
        self.keys = secrets.create(root)
        make_char_tokenizer(root / "model")
        self._lease = LeaseKeeper(self.paths.rendezvous, 1, 30.0)
        self._context = zmq.Context()
        self._socket, port = sockets.router(self._context, self.keys, "127.0.0.1")
        self._rendezvous = Rendezvous(self.paths.rendezvous, "orchestrator-0", 1)
        self._rendezvous.publish("ready", env_address=f"tcp://127.0.0.1:{port}")
        self._messages: list[Message] = []
        self._write_plan()
        self.processes = {name: self._start(name) for name in WORKERS}

    def _write_plan(self) -> None:
        processes = [ProcessPlan(name=name, component="environment", index=0, node=0, command=[], log="", env={})
                     for name in WORKERS]  # fmt: skip
        config = to_dict(parse(raw_config(self.paths.root / "model")))
        self.paths.plan.write_bytes(RunPlan(name="r", run_dir=str(self.paths.root), attempt=1, nodes=1, forks=[],
                                            checkpoint=None, processes=processes, config=config).dump())  # fmt: skip

    def _start(self, name: str) -> Process:
        """The first as a user starts it; the others are forked, since verifiers takes seconds to load."""
        env = {**os.environ, "PRIME_HPC_SOURCE": name.split("-")[1], "PRIME_HPC_SOURCE_KIND": "train"}
        command = [sys.executable, "-m", "prime_hpc.envs", str(self.paths.plan), "--process", name]
        return (start_afresh if name == WORKERS[0] else start_warm)(command, env, self.log(name))

    def log(self, name: str) -> Path:
        return self.paths.root / f"{name}.log"

    def wait_exit(self, name: str) -> int:
        return self.processes[name].wait(DEADLINE_S)

    def send(self, worker: str, message: Message) -> None:
        self._socket.send_multipart([worker.encode(), *encode(message)])

    def expect(self, kind: type, matches=lambda message: True) -> Message:
        """The first message of a kind that matches, taken out of what has come or comes."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            for message in self._messages:
                if isinstance(message, kind) and matches(message):
                    self._messages.remove(message)
                    return message
            if not self._socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
                logs = "\n".join(self.log(name).read_text()[-3000:] for name in WORKERS)
                raise AssertionError(f"no {kind.__name__} within {DEADLINE_S:.0f} s:\n{logs}")
            self._messages.append(decode(self._socket.recv_multipart()[1:]))

    def hello(self, worker: str) -> WorkerHello:
        return self.expect(WorkerHello, lambda m: m.worker == worker)

    def done(self, rollout_id: str) -> RolloutDone:
        return self.expect(RolloutDone, lambda m: m.rollout.rollout_id == rollout_id)

    def move(self) -> None:
        """Come back at another address, as after a restart."""
        self._socket.close()
        self._socket, port = sockets.router(self._context, self.keys, "127.0.0.1")
        self._messages = [m for m in self._messages if not isinstance(m, WorkerHello)]
        self._rendezvous.publish("ready", env_address=f"tcp://127.0.0.1:{port}")

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self._lease.close()
        self._context.destroy()


@pytest.fixture(scope="module")
def orchestrator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orchestrator]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIME_HPC_HOME", str(tmp_path_factory.mktemp("home")))
        made = Orchestrator(tmp_path_factory.mktemp("run"))
        yield made
        made.close()


@pytest.fixture(scope="module")
def engine(orchestrator: Orchestrator) -> Iterator[script.ScriptedEngine]:
    """One worker is to block from the start: it takes a while to be ended, so that the last tests ask for it."""
    with script.ScriptedEngine(orchestrator.keys.token) as running:
        orchestrator.hello("env-zoo-1")
        orchestrator.send("env-zoo-1", request(running, "blocks", MODES.index("block"), limit_s=1.0))
        yield running


def request(engine: script.ScriptedEngine, rollout_id: str, task: int, limit_s: float = 60.0) -> RunRollout:
    sampling = {"temperature": 0.5, "top_p": 1.0, "max_tokens": None}
    return RunRollout(rollout_id=rollout_id, task_index=task, base_url=engine.base_url, model="policy", version=NEW,
                      sampling=sampling, time_limit_s=limit_s)  # fmt: skip


def run_zoo(orchestrator: Orchestrator, engine: script.ScriptedEngine, mode: str, limit_s: float = 60.0) -> RolloutDone:
    """The outcome of the zoo's task `mode`."""
    orchestrator.send("env-zoo-0", request(engine, mode, MODES.index(mode), limit_s))
    return orchestrator.done(mode)


def streams(sample: Sample) -> list[list]:
    return [stream.numpy().tolist() for stream in (sample.token_ids, sample.mask, sample.logprobs, sample.versions)]


def reply_versions(reply: list[int]) -> list[int]:
    return [OLD.pack()] * 3 + [NEW.pack()] * (len(reply) - 3)


def test_reverse_text_from_hello_to_the_end(orchestrator: Orchestrator, engine: script.ScriptedEngine) -> None:
    worker = "env-reverse_text-0"
    hello = orchestrator.hello(worker)
    assert (hello.source, hello.capacity, hello.num_tasks, hello.first) == ("reverse_text", 8, 32, True)
    for index in range(16):
        orchestrator.send(worker, request(engine, f"r{index}", index))
    orchestrator.send(worker, request(engine, "r15", 15))
    rewards = []
    for index in range(16):
        rollout = orchestrator.done(f"r{index}").rollout
        assert rollout.failure is None
        number, text = rollout.task_id.split("-")
        reply = script.reply_to(text)
        prompt = [script.USER_ID, *script.encode(text), script.ASSISTANT_ID]
        [sample] = rollout.samples
        assert int(number) == index and sample.sample_id == f"r{index}/0"
        assert sample.temperature == 0.5 and sample.source == "reverse_text"
        assert streams(sample) == [
            [*prompt, *reply],
            [False] * len(prompt) + [True] * len(reply),
            [0.0] * len(prompt) + script.logprobs_of(reply),
            [NOT_SAMPLED] * len(prompt) + reply_versions(reply),
        ]
        assert rollout.reward == rollout.metrics["exact_match"] == float(text[0] not in "ab")
        assert rollout.rewards == {"reversed_text": rollout.reward}
        assert (rollout.prompt_tokens, rollout.completion_tokens) == (len(prompt), len(reply))
        assert rollout.num_turns == 1 and not rollout.truncated
        assert 0 < rollout.phases["model"] <= sum(rollout.phases.values()) <= rollout.seconds
        rewards.append(rollout.reward)
    assert {0.0, 1.0} == set(rewards)
    assert "0.1" in engine.salts
    assert all("max_tokens" not in s and s["temperature"] == 0.5 for s in engine.sampling)

    loaded = Path(f"/proc/{orchestrator.processes[worker].pid}/maps").read_text()
    assert "tokenizers" in loaded and "libtorch" not in loaded, "episodes need no torch"

    orchestrator.move()
    hello = orchestrator.hello(worker)
    assert not hello.first and hello.running == []
    orchestrator.send(worker, request(engine, "after", 0))
    assert orchestrator.done("after").rollout.failure is None
    orchestrator.processes[worker].send_signal(signal.SIGTERM)
    assert orchestrator.wait_exit(worker) == 0, orchestrator.log(worker).read_text()


def test_turns_of_a_stable_tokenizer_are_one_sample(orchestrator: Orchestrator, engine: script.ScriptedEngine) -> None:
    orchestrator.hello("env-zoo-0")
    done = run_zoo(orchestrator, engine, "turns")
    assert done.rollout.failure is None
    ids, mask = [], []
    versions = []
    for text in ("turns", "again", "more"):
        prompt, reply = [script.USER_ID, *script.encode(text), script.ASSISTANT_ID], script.reply_to(text)
        ids += [*prompt, *reply]
        mask += [False] * len(prompt) + [True] * len(reply)
        versions += [NOT_SAMPLED] * len(prompt) + reply_versions(reply)
    [sample] = done.rollout.samples
    assert streams(sample)[:2] == [ids, mask] and streams(sample)[3] == versions
    assert done.rollout.reward == 3.0 and done.rollout.num_turns == 3


def test_tokens_without_a_stamp_have_no_version(orchestrator: Orchestrator, engine: script.ScriptedEngine) -> None:
    [sample] = run_zoo(orchestrator, engine, "unstamped").rollout.samples
    assert sample.mask.numpy().sum() == len(script.reply_to("unstamped"))
    assert set(sample.versions.numpy().tolist()) == {NOT_SAMPLED}


@pytest.mark.parametrize(
    "mode, kind, error, message",
    [
        ("raise", "environment", "TaskError", "the grader has a bug"),
        ("nan", "environment", "InvalidReward", "nan"),
        ("fail", "inference", "ProviderError", "the engine has a bug"),
        ("hang", "environment", "Timeout", "not over after 2 s"),
        ("stuck", "environment", "ScoringTimeout", "scoring"),
    ],
)
def test_failures_are_typed(
    orchestrator: Orchestrator, engine: script.ScriptedEngine, mode: str, kind: str, error: str, message: str
) -> None:
    rollout = run_zoo(orchestrator, engine, mode, limit_s=2.0 if mode == "hang" else 60.0).rollout
    assert (rollout.failure.kind, rollout.failure.type) == (kind, error)
    assert message in rollout.failure.message
    assert rollout.reward is None and rollout.samples == []


def test_an_episode_without_end_is_scored_where_the_context_is_full(
    orchestrator: Orchestrator, engine: script.ScriptedEngine
) -> None:
    rollout = run_zoo(orchestrator, engine, "flood").rollout
    assert rollout.failure is None and rollout.truncated
    assert rollout.reward == rollout.num_turns > 1
    assert all(len(sample.token_ids) <= 48 for sample in rollout.samples)


def test_cancelled_rollout_is_answered_as_cancelled(orchestrator: Orchestrator, engine: script.ScriptedEngine) -> None:
    orchestrator.send("env-zoo-0", request(engine, "cancelled", MODES.index("hang")))
    orchestrator.send("env-zoo-0", CancelRollout(rollout_id="cancelled"))
    failure = orchestrator.done("cancelled").rollout.failure
    assert (failure.kind, failure.type) == ("infrastructure", "Cancelled")


@pytest.mark.usefixtures("engine")
def test_blocking_environment_ends_its_process(orchestrator: Orchestrator) -> None:
    assert orchestrator.wait_exit("env-zoo-1") == EXIT_BLOCKED
    log = orchestrator.log("env-zoo-1").read_text()
    assert "the event loop has stood still" in log and "zoo.py" in log


def test_missing_environment_is_named(orchestrator: Orchestrator) -> None:
    assert orchestrator.wait_exit("env-absent-0") == 78
    last = orchestrator.log("env-absent-0").read_text().splitlines()[-1]
    assert "EnvironmentFailure: source 'absent': environment 'absent_environment' does not load" in last
