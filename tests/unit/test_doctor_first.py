"""Many processes fail, and the doctor finds the one that failed first."""

from pathlib import Path

import pytest

from tests.unit.run_dirs import RunDir, clocks

RESET = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.7]:31415: Connection "
    "reset by peer. This is typically caused by a remote worker hanging or bugs in the application."
)
TIMED_OUT = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 600000ms for "
    "recv operation to complete"
)
NCCL = (
    "[rank{rank}]:[E1118 <600>.{rank}08271257 ProcessGroupNCCL.cpp:683] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, "
    "Timeout(ms)=600000) ran for 600060 milliseconds before timing out.\n"
    "[rank{rank}]:[E1118 <600>.465150152 ProcessGroupNCCL.cpp:1664] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
    "Exception (either an error or timeout) detected by watchdog at work: 1580, last enqueued NCCL work: {enqueued}, "
    "last completed NCCL work: 1579.\n"
)
NCCL_PEER = (
    "DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3763, remote process "
    "exited or there was a network error, NCCL version 2.28.8"
)
GPU_MEMORY = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
ENGINE_DIED = "InferenceFailure: the engine process died; its last lines are in this log"
TIME_LIMIT = "slurmstepd: error: *** JOB 30 ON node7 CANCELLED AT <iso:3600> DUE TO TIME LIMIT ***\n"
NO_ANSWER = "InferenceFailure: inference-0 did not answer load: ConnectError All connection attempts failed"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "mine")


def test_a_killed_rank_precedes_the_reset_connection_of_its_peer(run: RunDir) -> None:
    run.failed("trainer-0", RESET, at=100.0)
    run.event("exit", at=100.4, process="trainer-1", exit_code=-9)  # dead before trainer-0 noticed, seen after it
    run.event("stop", at=100.5)
    run.event("exit", at=101.0, process="orchestrator-0", exit_code=-15)
    diagnosis = run.diagnose(now=200)
    assert (diagnosis.process, diagnosis.rank, diagnosis.cause) == ("trainer-1", 1, "killed")
    assert diagnosis.followed == ["trainer-0: peer lost, -0.4 s"]


@pytest.mark.parametrize("symptom", [RESET, NCCL_PEER])
def test_a_rank_without_memory_precedes_its_peers(run: RunDir, symptom: str) -> None:
    run.failed("trainer-0", symptom, at=100.1)
    run.failed("trainer-1", GPU_MEMORY, at=100.2)  # it took its time to die
    diagnosis = run.diagnose(now=200)
    assert (diagnosis.process, diagnosis.cause) == ("trainer-1", "CUDA out of memory")


def test_a_dead_engine_precedes_the_orchestrator_that_missed_it(run: RunDir) -> None:
    run.failed("orchestrator-0", NO_ANSWER, at=100.0)
    log = ("(EngineCore pid=12) ERROR 11-18 <95> [core.py:2663] EngineCore encountered a fatal error.\n"
           f"(EngineCore pid=12) ERROR 11-18 <95> [core.py:2663] torch.{GPU_MEMORY}\n")  # fmt: skip
    run.failed("inference-0", ENGINE_DIED, at=103, log=log)
    diagnosis = run.diagnose(now=200)
    assert (diagnosis.process, diagnosis.cause) == ("inference-0", "CUDA out of memory")
    assert (diagnosis.evidence[0].line, diagnosis.followed) == (2, ["orchestrator-0: engine does not answer, -3.0 s"])


def test_a_restart_that_was_asked_for_once_too_often_is_told_by_its_reason(run: RunDir) -> None:
    reason = "orchestrator-0 asked: CorruptData: inference-0 refused the weights: v0.3 does not match its digest"
    run.event("asked", at=60, process="trainer-0", reason=reason)
    run.event("stop", at=60.1, reason="failed")
    diagnosis = run.diagnose(now=100)
    assert (diagnosis.process, diagnosis.cause) == ("trainer-0", "corrupt weights")


def test_an_environment_that_does_not_load_precedes_the_deadline_of_its_hello(run: RunDir) -> None:
    error = "EnvironmentFailure: source 'words': environment 'words' does not load: RuntimeError: no words"
    run.failed("env-words-0", error, at=20)
    run.failed("orchestrator-0", "DeadlineExceeded: orchestrator-0 waited 300 s for a hello from env-words-0; see the "
               "log of env-words-0", at=310)  # fmt: skip
    diagnosis = run.diagnose(now=400)
    assert (diagnosis.process, diagnosis.cause) == ("env-words-0", "environment does not load")


def test_what_was_stopped_is_not_to_blame(run: RunDir) -> None:
    run.failed("env-words-0", "PermissionError: [Errno 13] Permission denied: '/data'", at=50)
    run.event("stop", at=51, reason="env-words-0 failed")
    run.failed("inference-0", GPU_MEMORY, at=52)  # a crash on the way out
    run.event("exit", at=53, process="trainer-0", exit_code=-15)
    diagnosis = run.diagnose(now=100)
    assert (diagnosis.process, diagnosis.cause, diagnosis.followed) == ("env-words-0", "not writable", [])


def test_what_the_supervisor_killed_because_of_a_failure_is_not_to_blame(run: RunDir) -> None:
    run.failed("orchestrator-0", NO_ANSWER, at=50)
    run.event("exit", at=61, process="inference-0", exit_code=-9)  # after the grace period
    diagnosis = run.diagnose(now=100)
    assert (diagnosis.process, diagnosis.cause) == ("inference-0", "engine does not answer")
    assert diagnosis.exit_code is None


def test_an_unknown_error_gives_way_to_a_known_one_of_the_same_moment(run: RunDir) -> None:
    run.failed("trainer-0", "RuntimeError: something else fell over", at=100.0)
    run.failed("trainer-1", GPU_MEMORY, at=101.0)
    assert run.diagnose(now=200).process == "trainer-1"


def test_a_known_error_much_later_does_not_excuse_the_first(run: RunDir) -> None:
    run.failed("trainer-0", "RuntimeError: something else fell over", at=100.0)
    run.failed("trainer-1", GPU_MEMORY, at=120.0)
    diagnosis = run.diagnose(now=200)
    assert (diagnosis.process, diagnosis.verdict) == ("trainer-0", "unknown")


def test_gloo_names_no_rank_so_the_silent_one_is_missing(run: RunDir) -> None:
    run.failed("trainer-0", TIMED_OUT, at=700)
    run.log("trainer-1", "<90> INFO    trainer-1 step 8 | loss 0.1\n", at=90)
    run.beat("trainer-1", at=95, doing="writing checkpoint step 8")
    run.event("stop", at=701)
    run.event("exit", at=712, process="trainer-1", exit_code=-9)
    diagnosis = run.diagnose(now=800)
    assert (diagnosis.process, diagnosis.rank, diagnosis.cause) == ("trainer-1", 1, "collective time-out")
    assert diagnosis.headline == "trainer-1 did not come to a collective that the other ranks waited for"
    texts = {(e.file, e.line): e.text for e in diagnosis.evidence}
    assert texts["logs/attempt_1/trainer-0.log", 4].startswith("RuntimeError: [/pytorch/third_party/gloo")
    assert texts["logs/attempt_1/trainer-1.log", 1] == clocks("last line: <90> INFO    trainer-1 step 8 | loss 0.1")
    assert texts["rendezvous/beats/trainer-1.json", None].endswith("705 s ago, writing checkpoint step 8")


@pytest.mark.parametrize("rank0, rank1, missing", [(1582, 1580, "trainer-1"), (1580, 1582, "trainer-0")])
def test_nccl_counts_collectives_so_the_one_behind_is_missing(
    run: RunDir, rank0: int, rank1: int, missing: str
) -> None:
    for rank, enqueued in enumerate((rank0, rank1)):
        run.log(f"trainer-{rank}", NCCL.format(rank=rank, enqueued=enqueued), at=600)
        run.event("exit", at=601 + rank, process=f"trainer-{rank}", exit_code=-6)
    diagnosis = run.diagnose(now=700)
    assert (diagnosis.process, diagnosis.cause) == (missing, "collective time-out")
    assert diagnosis.evidence[0].line == 1


def test_nccl_ranks_that_are_level_blame_the_network(run: RunDir) -> None:
    for rank in range(2):
        run.log(f"trainer-{rank}", NCCL.format(rank=rank, enqueued=1580), at=600)
        run.event("exit", at=601 + rank, process=f"trainer-{rank}", exit_code=-6)
    diagnosis = run.diagnose(now=700)
    assert diagnosis.headline == "every rank came to a collective, and it did not end in time"
    assert "NCCL_DEBUG=INFO" in diagnosis.remedy


def test_a_deadline_leads_along_the_waits_to_the_process_that_waits_for_nobody(run: RunDir) -> None:
    run.failed("trainer-0", "DeadlineExceeded: trainer-0 waited 3600 s for batch 9 from orchestrator-0; see the log of "
               "orchestrator-0", at=3700)  # fmt: skip
    run.beat("orchestrator-0", at=3690, wait=("rollouts", "env-words-0", 100, 7200))
    run.beat("env-words-0", at=3690, doing="scoring rollout w-17")
    diagnosis = run.diagnose(now=3800)
    assert (diagnosis.process, diagnosis.cause) == ("env-words-0", "deadline exceeded")
    assert diagnosis.headline == "trainer-0 waited 3600 s for batch 9, and env-words-0 did not deliver"
    assert [e.text for e in diagnosis.evidence if "beats" in e.file] == [
        "orchestrator-0 has waited 3700 s for rollouts from env-words-0 (deadline 7200 s)",
        "env-words-0 waits for nobody; it was last seen 110 s ago, scoring rollout w-17",
    ]


def test_a_hang_that_the_supervisor_declared_leads_along_the_waits(run: RunDir) -> None:
    run.beat("trainer-0", at=590, wait=("all_reduce", "trainer-1", 100, 300))
    run.beat("trainer-1", at=590, wait=("batch 9", "orchestrator-0", 100, 3600))
    run.beat("orchestrator-0", at=590, doing="evaluating")
    run.event("hang", at=600, process="trainer-0", reason="no progress for 500 s")
    run.event("exit", at=611, process="trainer-0", exit_code=-9)
    run.event("exit", at=611, process="trainer-1", exit_code=-9)
    diagnosis = run.diagnose(now=700)
    assert (diagnosis.process, diagnosis.component, diagnosis.cause) == ("orchestrator-0", "orchestrator", "hang")
    assert ("events.jsonl", 1, "trainer-0: hang (no progress for 500 s)") in [
        (e.file, e.line, e.text) for e in diagnosis.evidence
    ]


def test_of_a_job_step_the_rank_whose_log_speaks(run: RunDir) -> None:
    run.log("trainer-0", f"Traceback (most recent call last):\n{RESET}\n", at=100)
    run.log("trainer-1", "<90> INFO    trainer-1 step 8\nOutOfMemoryError: CUDA out of memory.\n", at=100)
    run.event("exit", at=101, unit="trainer", exit_code=137)
    diagnosis = run.diagnose(now=200)
    assert (diagnosis.process, diagnosis.rank, diagnosis.cause) == ("trainer-1", 1, "CUDA out of memory")


def test_of_a_job_step_that_says_nothing_the_exit_code(run: RunDir) -> None:
    for rank in range(2):
        run.log(f"trainer-{rank}", f"<90> INFO    trainer-{rank} step 8\n", at=100)
    run.event("exit", at=101, unit="trainer", exit_code=137)
    diagnosis = run.diagnose(now=200)
    assert (diagnosis.process, diagnosis.component, diagnosis.rank) == ("trainer", "trainer", None)
    assert (diagnosis.cause, diagnosis.exit_code, diagnosis.followed) == ("killed", -9, [])


def test_of_a_hung_unit_the_process_that_waits_for_none_of_its_own(run: RunDir) -> None:
    run.beat("trainer-0", at=590, wait=("all_reduce", "trainer-1", 100, 300))
    run.beat("trainer-1", at=590, doing="step 9")
    run.event("hang", at=600, unit="trainer", reason="no progress for 500 s")
    diagnosis = run.diagnose(now=700)
    assert (diagnosis.process, diagnosis.rank, diagnosis.cause) == ("trainer-1", 1, "hang")


def test_waits_in_a_circle_end(run: RunDir) -> None:
    run.beat("trainer-0", at=590, wait=("x", "trainer-1", 100, 300))
    run.beat("trainer-1", at=590, wait=("y", "trainer-0", 100, 300))
    run.event("hang", at=600, unit="trainer", process="trainer-0")
    assert run.diagnose(now=700).process == "trainer-0"


def test_a_failure_that_was_mended_is_no_cause_and_is_noted(run: RunDir) -> None:
    run.event("exit", at=10, process="inference-0", exit_code=-9)
    run.event("restart", at=12, unit="inference-0", restart=1)
    run.event("recovered", at=40, unit="inference-0", restart=1)
    run.failed("trainer-0", GPU_MEMORY, at=500)
    diagnosis = run.diagnose(now=600)
    assert (diagnosis.process, diagnosis.cause, diagnosis.followed) == ("trainer-0", "CUDA out of memory", [])
    assert diagnosis.notes == ["inference-0: restart", "inference-0: recovered"]


def test_of_many_restarts_the_first_failure_counts(run: RunDir) -> None:
    run.log("env-words-0", "Traceback (most recent call last):\nModuleNotFoundError: No module named 'nltk'\n", at=10)
    run.event("exit", at=10, process="env-words-0", exit_code=1)
    run.event("restart", at=12, unit="env-words-0", restart=1)
    run.log("env-words-0", "OSError: [Errno 98] Address already in use\n", at=20, restart=1)
    run.event("exit", at=20, process="env-words-0", exit_code=1, restart=1)
    diagnosis = run.diagnose(now=100)
    assert (diagnosis.cause, diagnosis.evidence[0].file) == ("missing package", "logs/attempt_1/env-words-0.log")


def test_a_failure_in_a_restart_is_read_from_the_log_of_that_start(run: RunDir) -> None:
    run.event("exit", at=10, process="env-words-0", exit_code=1)
    run.event("restart", at=12, unit="env-words-0", restart=1)
    run.event("recovered", at=15, unit="env-words-0", restart=1)
    run.log("env-words-0", "OSError: [Errno 98] Address already in use\n", at=20, restart=1)
    run.event("exit", at=20, process="env-words-0", exit_code=1, restart=1)
    diagnosis = run.diagnose(now=100)
    assert (diagnosis.cause, diagnosis.evidence[0].file) == ("port in use", "logs/attempt_1/env-words-0.restart_1.log")


def test_a_kill_of_another_unit_while_one_restarts_is_its_own_failure(run: RunDir) -> None:
    run.event("exit", at=10, process="inference-0", exit_code=1)
    run.event("restart", at=12, unit="inference-0", restart=1)
    run.event("recovered", at=40, unit="inference-0", restart=1)
    run.event("exit", at=41, process="trainer-1", exit_code=-9)
    assert run.diagnose(now=100).process == "trainer-1"


def test_a_lost_supervisor_takes_everybody_along(run: RunDir) -> None:
    run.event("start", at=0)
    run.lease(at=100)
    for process in ("trainer-0", "inference-0"):
        run.log(process, f"<131> ERROR   {process} leaving: the supervisor gave no sign for 30 s\n", at=131)
    diagnosis = run.diagnose(now=300)
    assert (diagnosis.process, diagnosis.cause) == ("supervisor", "supervisor lost")
    assert [e.text for e in diagnosis.evidence][0] == "last beat 200 s ago"
    assert diagnosis.evidence[1].text.endswith("leaving: the supervisor gave no sign for 30 s")


def test_exits_of_fenced_processes_point_at_the_supervisor(run: RunDir) -> None:
    run.lease(at=100)
    run.event("exit", at=132, process="trainer-0", exit_code=75)
    run.event("exit", at=133, process="inference-0", exit_code=75)
    assert (run.diagnose(now=300).process, run.diagnose(now=300).cause) == ("supervisor", "supervisor lost")


@pytest.mark.parametrize(
    "reason, cause",
    [("TIME LIMIT", "time limit"), ("PREEMPTION", "preemption"), ("NODE FAILURE", "node failure")],
)
def test_the_end_of_a_job_precedes_the_fall_of_its_processes(run: RunDir, reason: str, cause: str) -> None:
    run.log("slurm-30", TIME_LIMIT.replace("TIME LIMIT", reason), at=3601)
    run.event("exit", at=3600.5, process="trainer-0", exit_code=143)
    run.failed("orchestrator-0", NO_ANSWER, at=3601)
    diagnosis = run.diagnose(now=4000)
    assert (diagnosis.cause, diagnosis.time) == (cause, 1_795_003_600.0)
    assert (diagnosis.evidence[0].file, diagnosis.evidence[0].line) == ("logs/attempt_1/slurm-30.log", 1)


def test_a_failure_well_before_the_end_of_its_job_is_the_cause(run: RunDir) -> None:
    run.failed("trainer-0", GPU_MEMORY, at=100)
    run.log("slurm-30", TIME_LIMIT, at=3601)
    assert run.diagnose(now=4000).process == "trainer-0"


@pytest.mark.parametrize(
    "kind, reason, cause, headline",
    [
        ("interrupted", "Slurm: time limit in 60 s", "time limit", "the job reached its time limit"),
        ("interrupted", "SIGTERM: preempted", "preemption", "the job was preempted"),
        ("interrupted", "Ctrl-C", "stopped", "the run was stopped: Ctrl-C"),
        ("stop", "ada: wrong data", "stopped", "the run was stopped: ada: wrong data"),
    ],
)
def test_an_end_that_somebody_wanted(run: RunDir, kind: str, reason: str, cause: str, headline: str) -> None:
    run.checkpoint(20)
    run.event(kind, at=50, reason=reason)
    run.event("exit", at=51, process="trainer-0", exit_code=-15)
    run.record("env-words-0", "failed", at=52, error="ConnectionResetError: [Errno 104] Connection reset by peer")
    diagnosis = run.diagnose(now=100)
    assert (diagnosis.cause, diagnosis.headline, diagnosis.exit_status) == (cause, headline, 1)
    assert diagnosis.remedy.endswith(f"; to go on from step 20: python -m prime_hpc.resume {run.paths.root}")


def test_without_events_the_published_errors_suffice(run: RunDir) -> None:
    for process, error, at in (("trainer-0", RESET, 100.0), ("env-words-0", "KeyError: 'answer'", 99.0)):
        run.log(process, f"Traceback (most recent call last):\n{error}\n", at=at)
        run.record(process, "failed", at=at, error=error)
    diagnosis = run.diagnose(now=200)
    assert (diagnosis.process, diagnosis.verdict) == ("env-words-0", "unknown")


def test_of_an_older_attempt_the_logs_suffice(run: RunDir) -> None:
    run.log("trainer-1", f"<99> INFO    trainer-1 step 3\nTraceback (most recent call last):\n{GPU_MEMORY}\n", at=100)
    run.log("trainer-0", f"Traceback (most recent call last):\n{RESET}\n", at=99)
    newer = RunDir(run.paths.root, attempt=2)
    newer.lease(at=500)
    newer.record("trainer-0", "training", at=500)
    diagnosis = newer.diagnose(now=501, attempt=1)
    assert (diagnosis.attempt, diagnosis.process, diagnosis.cause) == (1, "trainer-1", "CUDA out of memory")
    assert newer.diagnose(now=501).verdict == "healthy"


def test_nothing_is_written(run: RunDir) -> None:
    run.failed("trainer-0", GPU_MEMORY, at=100)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.paths.root.rglob("*")}
    run.diagnose(now=200)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.paths.root.rglob("*")} == before
