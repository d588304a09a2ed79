"""One process fails, and the doctor names the cause, the line that says so, and what to do."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from prime_hpc.config.schema import known_keys
from prime_hpc.observe.doctor import cause, causes
from prime_hpc.observe.doctor.cause import Cause
from tests.unit.run_dirs import RunDir

LOGS = Path(__file__).parent / "failed_logs"
"""Ends of logs as processes left them; `<S>` stands for the clock S seconds after the start."""


@dataclass(frozen=True)
class Case:
    """Whose log it is, the cause, the line that tells, and words of the remedy."""

    process: str
    cause: str
    line: int
    remedy: str


CASES = {
    "trainer_without_gpu_memory": Case("trainer-1", "CUDA out of memory", 4, "trainer.micro_batch_tokens"),
    "engine_without_gpu_memory": Case("inference-0", "CUDA out of memory", 5, "inference.vllm.max_num_seqs"),
    "kv_cache": Case("inference-0", "KV cache too small", 31, "inference.vllm.kv_cache_memory_bytes"),
    "max_model_len": Case("inference-0", "KV cache too small", 5, "inference.vllm.max_model_len"),
    "gpu_taken": Case("inference-0", "GPU memory taken", 5, "nvidia-smi"),
    "disk_full": Case("trainer-0", "disk full", 6, "checkpoint.keep_last"),
    "disk_full_at_a_save": Case("trainer-0", "disk full", 4, "free space"),
    "read_only": Case("orchestrator-0", "not writable", 4, "run.output_dir"),
    "not_permitted": Case("orchestrator-0", "not writable", 4, "run.output_dir"),
    "corrupt_checkpoint": Case("trainer-0", "corrupt checkpoint", 4, "resume=STEP"),
    "corrupt_weights": Case("trainer-0", "corrupt weights", 16, "pointer of Git LFS"),
    "refused_weights": Case("orchestrator-0", "corrupt weights", 4, "errors of the file system"),
    "environment_does_not_load": Case("env-words-0", "environment does not load", 10, "mend the environment"),
    "environment_refuses_args": Case("env-words-0", "environment does not load", 2, "or its args"),
    "error_budget": Case("orchestrator-0", "error budget", 4, "rollouts/step_N.jsonl.zst"),
    "environment_blocks": Case("env-words-0", "environment blocks", 3, "asyncio.to_thread"),
    "port": Case("trainer-0", "port in use", 4, "picks a free one"),
    "template": Case("env-words-0", "no chat template", 4, "model.renderer"),
    "missing_files": Case("trainer-0", "missing model files", 4, "model.path"),
    "not_in_the_cache": Case("inference-0", "missing model files", 4, "nothing is fetched"),
    "not_finite": Case("trainer-0", "loss not finite", 4, "optimizer.lr"),
    "equal_rewards": Case("orchestrator-0", "nothing to train", 4, "too easy"),
    "other_schema": Case("trainer-0", "schema mismatch", 4, "one installation"),
    "missing_extra": Case("inference-0", "missing package", 4, "pip install 'prime-hpc[gpu]'"),
    "missing_package": Case("orchestrator-0", "missing package", 4, "the package of the module deep_ep"),
    "missing_library": Case("trainer-0", "missing package", 4, "libcudart.so.13"),
    "no_gpu": Case("trainer-0", "no GPU", 4, "trainer.device=cpu"),
    "broken_gpu": Case("trainer-0", "GPU fault", 4, "CUDA_LAUNCH_BLOCKING=1"),
    "host_memory_in_python": Case("orchestrator-0", "out of host memory", 4, "--mem"),
    "host_memory_in_torch": Case("trainer-0", "out of host memory", 4, "env.workers"),
    "too_long": Case("inference-0", "sequence too long", 4, "lower seq_len"),
    "typed": Case("orchestrator-0", "typed failure", 4, "do what the message says"),
}


@pytest.mark.parametrize("name", CASES)
def test_cause_line_and_remedy(name: str, tmp_path: Path) -> None:
    case, run = CASES[name], RunDir(tmp_path / "mine")
    log = (LOGS / f"{name}.log").read_text()
    ended, error = re.findall(rf"<(\d+)> ERROR   {case.process} (.*)", log, flags=re.DOTALL)[-1]
    run.failed(case.process, error.rstrip(), at=int(ended), log=log)
    diagnosis = run.diagnose(now=200)
    assert (diagnosis.verdict, diagnosis.exit_status) == ("failed", 1)
    assert (diagnosis.process, diagnosis.cause, diagnosis.exit_code) == (case.process, case.cause, 1)
    first = diagnosis.evidence[0]
    assert (first.file, first.line) == (f"logs/attempt_1/{case.process}.log", case.line)
    assert case.remedy in diagnosis.remedy
    assert "{" not in diagnosis.headline + diagnosis.remedy


def test_every_mistake_of_a_configuration_is_shown(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    error = ("ConfigurationError: 2 problems in the configuration:\n"
             "  inference.vllm.max_num_seq = 8: expected no such key; did you mean 'max_num_seqs'?\n"
             "  inference.vllm.dtyp = 'auto': expected no such key; did you mean 'dtype'?")  # fmt: skip
    run.failed("inference-0", error, at=5)
    diagnosis = run.diagnose(now=60)
    assert (diagnosis.cause, diagnosis.headline) == ("configuration", "inference-0 refuses its configuration")
    assert [(e.line, e.text) for e in diagnosis.evidence[:3]] == [
        (6, "ConfigurationError: 2 problems in the configuration:"),
        (7, "inference.vllm.max_num_seq = 8: expected no such key; did you mean 'max_num_seqs'?"),
        (8, "inference.vllm.dtyp = 'auto': expected no such key; did you mean 'dtype'?"),
    ]


def test_an_error_that_nobody_knows_is_named_and_the_verdict_is_unknown(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    run.failed("env-words-0", "ZeroDivisionError: division by zero", at=5)
    diagnosis = run.diagnose(now=60)
    assert (diagnosis.verdict, diagnosis.exit_status) == ("unknown", 2)
    assert diagnosis.headline == "env-words-0 failed: ZeroDivisionError: division by zero"
    assert (diagnosis.process, diagnosis.component, diagnosis.rank) == ("env-words-0", "environment", 0)
    assert diagnosis.evidence[0].file == "logs/attempt_1/env-words-0.log"


@pytest.mark.parametrize("code, said", [(3, "exit code 3, without a word"), (None, "its node is gone")])
def test_an_exit_without_a_word_is_unknown(code: int | None, said: str, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    run.log("inference-0", "<3> INFO    inference-0 serving version 0.0 on port 4711\n", at=3)
    run.event("exit", at=50, process="inference-0", exit_code=code, reason="" if code else said)
    diagnosis = run.diagnose(now=100)
    assert (diagnosis.verdict, diagnosis.headline) == ("unknown", f"inference-0 failed: {said}")


SAVE = ("ERROR   trainer-0 checkpoint 20 could not be written to /runs/mine/checkpoints (OSError(28, 'No space left on "
        "device')); there is no checkpoint yet. The run goes on; free space before the next save\n")  # fmt: skip


def test_an_error_that_was_survived_is_not_the_cause(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    log = (f"Traceback (most recent call last):\nOSError: [Errno 30] Read-only file system\n"
           f"<20> INFO    trainer-0 step 21 | loss 0.0035\n<290> {SAVE}"
           f"<292> WARNING trainer-0 CUDA out of memory, retrying\n"
           f"Traceback (most recent call last):\nModuleNotFoundError: No module named 'wandb'\n")  # fmt: skip
    run.failed("trainer-0", "KeyError: 'x'", at=300, log=log)
    diagnosis = run.diagnose(now=400)
    assert (diagnosis.cause, diagnosis.evidence[0].line) == ("missing package", 7)


EXITS = {-9: "killed", 137: "killed", -15: "terminated", 143: "terminated", -11: "crash", -7: "crash", -6: "crash",
         -2: "interrupted"}  # fmt: skip


@pytest.mark.parametrize("code", EXITS)
def test_signals_without_a_word(code: int, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    run.log("inference-0", "<3> INFO    inference-0 serving version 0.0 on port 4711\n", at=3)
    run.event("exit", at=50, process="inference-0", exit_code=code)
    diagnosis = run.diagnose(now=100)
    assert (diagnosis.process, diagnosis.cause) == ("inference-0", EXITS[code])
    assert ("events.jsonl", 1) in [(e.file, e.line) for e in diagnosis.evidence]


def test_a_kill_where_the_kernel_counts_kills_is_want_of_memory(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    run.record("env-words-0", "ready", at=2)
    run.event("exit", at=50, process="env-words-0", exit_code=-9)
    assert run.diagnose(now=100, oom_kills=0).cause == "killed"
    diagnosis = run.diagnose(now=100, oom_kills=2)
    assert diagnosis.cause == "out of host memory"
    assert diagnosis.headline == "env-words-0 ran out of host memory"
    assert (
        diagnosis.evidence[-1].text
        == "node7 has 64.0 GiB of memory; the cgroup of this command counts 2 kills for want of memory"
    )


def test_a_kill_that_the_supervisor_saw_the_kernel_do_is_want_of_memory(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    run.event("exit", at=50, process="trainer-1", exit_code=-9, oom_kills=1)
    diagnosis = run.diagnose(now=100)
    assert (diagnosis.process, diagnosis.rank, diagnosis.cause) == ("trainer-1", 1, "out of host memory")


def test_an_engine_that_died_with_a_kill_of_the_kernel_ran_out_of_memory(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    error = "InferenceFailure: the engine process died; its last lines are in this log"
    run.log("inference-0", f"<50> ERROR   inference-0 {error}\n", at=50)
    run.event("exit", at=50, process="inference-0", exit_code=1)
    assert run.diagnose(now=100).cause == "engine died"
    run.event("exit", at=50, process="inference-0", exit_code=1, oom_kills=1)
    (run.paths.root / "events.jsonl").write_text((run.paths.root / "events.jsonl").read_text().splitlines()[1] + "\n")
    assert run.diagnose(now=100).cause == "out of host memory"


def test_the_kill_of_a_job_step_is_read_from_slurm(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    run.log("env-words-0", "<2> INFO    env-words-0 ready\n"
            "slurmstepd: error: Detected 1 oom_kill event in StepId=30.3. Some of the step tasks have been OOM "
            "Killed.\n"
            "srun: error: node7: task 0: Out Of Memory\n", at=50)  # fmt: skip
    run.event("exit", at=50, process="env-words-0", exit_code=137)
    diagnosis = run.diagnose(now=100)
    assert (diagnosis.cause, diagnosis.evidence[0].line) == ("out of host memory", 2)


def test_an_engine_whose_core_was_killed_is_no_riddle(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    run.failed(
        "inference-0",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core "
        "proc(s): {'EngineCore_DP0': -9}",
        at=30,
    )
    assert run.diagnose(now=60).cause == "killed"


def test_remedies_name_keys_that_exist() -> None:
    entries = [value for value in vars(cause).values() if isinstance(value, Cause)]
    texts = [entry.remedy for entry in (*entries, *causes.CAUSES, *causes.VAGUE)]
    sections = "trainer|env|inference|checkpoint|update|run|model|optimizer"
    keys = {key for text in texts for key in re.findall(rf"\b(?:{sections})(?:\.[a-z_]+)+", text)}
    assert len(keys) > 15
    free_form = {key for key in keys if key.startswith("inference.vllm.")}
    unknown = [key for key in keys - free_form if key.split(".")[-1] not in known_keys(tuple(key.split(".")[:-1]))]
    assert unknown == []
