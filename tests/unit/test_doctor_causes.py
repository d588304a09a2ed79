"""One process fails, and the doctor names the cause, the line that says so, and what to do."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from prime_hpc.config.schema import known_keys
from prime_hpc.observe.doctor import cause, causes
from prime_hpc.observe.doctor.cause import Cause
from tests.unit.run_dirs import RunDir

CUDA_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 12.73 GiB is free. Including non-PyTorch memory, this process has 66.37 GiB memory in use. Of the allocated "
    "memory 59.08 GiB is allocated by PyTorch, and 5.35 GiB is reserved by PyTorch but unallocated."
)
KV_CACHE = (
    "ValueError: To serve at least one request with the model's max seq len (131072), (14.00 GiB KV cache is needed, which "
    "is larger than the available KV cache memory (3.18 GiB). Based on the available memory, the estimated maximum model "
    "length is 29728. Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or "
    "decreasing `max_model_len` when initializing the engine."
)
ENGINE_LOG = f"""\
(MainProcess pid=11) INFO 11-18 <1> [model.py:733] Resolved architecture: Qwen3ForCausalLM
(EngineCore pid=12) ERROR 11-18 <40> [core.py:1510] EngineCore failed to start.
(EngineCore pid=12) ERROR 11-18 <40> [core.py:1510] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-18 <40> [core.py:1510]     raise ValueError(
(EngineCore pid=12) ERROR 11-18 <40> [core.py:1510] {{error}}
Process EngineCore:
Traceback (most recent call last):
  File "/site-packages/vllm/v1/engine/core.py", line 1518, in run_engine_core
    raise e
{{error}}
Traceback (most recent call last):
  File "/site-packages/vllm/v1/engine/utils.py", line 1431, in wait_for_engine_startup
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{{{}}}}
<43> ERROR   inference-0 RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{{{}}}}
"""
ENGINE_FAILED = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
DISK = """\
<1> INFO    trainer-0 step 39 | loss 0.0035 | gradient norm 1.178 | lr 1.00e-05 | 15916 tokens/s | 0.84 s | 13.60 GiB
<70> INFO    trainer-0 step 40 | loss 0.0031 | gradient norm 1.181 | lr 1.00e-05 | 15916 tokens/s | 0.84 s | 13.60 GiB
Traceback (most recent call last):
  File "/site-packages/torch/serialization.py", line 1187, in _save
    zip_file.write_record(name, storage, num_bytes)
OSError: [Errno 28] No space left on device

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/site-packages/torch/serialization.py", line 967, in save
RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598
"""
LFS = "SafetensorError: Error while deserializing header: header too large"
NO_FILE = "OSError: Error no file named model.safetensors, or pytorch_model.bin, found in directory models/mine."
TEMPLATE = (
    "ValueError: Cannot use chat template functions because tokenizer.chat_template is not set and no template argument was "
    "passed! For information about writing templates and setting the tokenizer.chat_template attribute, please see the "
    "documentation at https://huggingface.co/docs/transformers/main/en/chat_templating"
)
PORT = (
    "DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, "
    "code: -98, name: EADDRINUSE, message: address already in use"
)
NAN = (
    "InfrastructureFailure: 6 steps in a row up to step 17 had a loss or gradient that is not finite (loss nan, gradient norm "
    "nan): lower optimizer.lr, or try trainer.dtype=float32"
)
CHECKPOINT = (
    "CorruptData: /runs/mine/checkpoints/step_20/__1_0.distcp has 512 bytes, its manifest says 4096: the file is missing or "
    "cut; resume from another checkpoint"
)
ENV = "EnvironmentFailure: source 'words': environment 'my_words' does not load: ModuleNotFoundError: No module named 'nltk'"
ENV_LOG = f"""\
Traceback (most recent call last):
  File "/home/me/my_words.py", line 1, in <module>
ModuleNotFoundError: No module named 'nltk'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/site-packages/prime_hpc/envs/environment.py", line 55, in __init__
prime_hpc.errors.{ENV}
"""
BUDGET = (
    "EnvironmentFailure: 62% of the last 100 episodes of words failed, more than env.error_budget = 50%; the last one: "
    "KeyError: 'answer'"
)
SCHEMA = (
    "SchemaMismatch: a peer speaks message schema '7', this process speaks 6: start every process of a run from one "
    "installation of prime_hpc"
)


@dataclass(frozen=True)
class Case:
    """A process that fails with `error`; its log, the cause, the line of the log that tells, words of the remedy."""

    process: str
    error: str
    cause: str
    line: int
    remedy: str
    log: str | None = None


CASES = {
    "trainer without GPU memory": Case("trainer-1", CUDA_OOM, "CUDA out of memory", 4, "trainer.micro_batch_tokens"),
    "engine without GPU memory": Case("inference-0", ENGINE_FAILED, "CUDA out of memory", 5, "inference.vllm.max_num_seqs",
                                      ENGINE_LOG.format(error=CUDA_OOM)),
    "KV cache": Case("inference-0", ENGINE_FAILED, "KV cache too small", 5, "inference.vllm.max_model_len",
                     ENGINE_LOG.format(error=KV_CACHE)),
    "GPU taken": Case("inference-0", ENGINE_FAILED, "GPU memory taken", 5, "nvidia-smi", ENGINE_LOG.format(error=(
        "ValueError: Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 71.2 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."))),
    "disk full": Case("trainer-0", "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598",
                      "disk full", 6, "checkpoint.keep_last", DISK),
    "disk full at a save": Case("trainer-0", "InfrastructureFailure: checkpoint 40 could not be written to /runs/mine/"
                                "checkpoints (OSError(28, 'No space left on device')); there is no checkpoint yet. Free "
                                "space or fix the file system, then resume", "disk full", 4, "free space"),
    "read-only": Case("orchestrator-0", "OSError: [Errno 30] Read-only file system: '/runs/mine/rollouts/journal.bin'",
                      "not writable", 4, "run.output_dir"),
    "not permitted": Case("orchestrator-0", "PermissionError: [Errno 13] Permission denied: '/runs/mine/metrics.jsonl'",
                          "not writable", 4, "run.output_dir"),
    "corrupt checkpoint": Case("trainer-0", CHECKPOINT, "corrupt checkpoint", 4, "resume=STEP"),
    "corrupt weights": Case("trainer-0", LFS, "corrupt weights", 4, "pointer of Git LFS"),
    "refused weights": Case("orchestrator-0", "CorruptData: inference-0 refused load: /runs/mine/weights/v0.3/model."
                            "safetensors does not match its digest: the file was changed or damaged", "corrupt weights", 4,
                            "errors of the file system"),
    "environment does not load": Case("env-words-0", ENV, "environment does not load", 10, "mend the environment", ENV_LOG),
    "error budget": Case("orchestrator-0", BUDGET, "error budget", 4, "rollouts/step_N.jsonl.zst"),
    "environment blocks": Case("env-words-0", "the event loop was blocked for more than 630 s", "environment blocks", 3,
                               "asyncio.to_thread",
                               'Thread 0x00007f (most recent call first):\n  File "/home/me/words.py", line 4 in reward\n'
                               "<20> ERROR   env-words-0 the event loop was blocked for more than 630 s; the stacks above "
                               "show where. Environment code must not block its event loop\n"),
    "port": Case("trainer-0", PORT, "port in use", 4, "picks a free one"),
    "template": Case("env-words-0", TEMPLATE, "no chat template", 4, "model.renderer"),
    "missing files": Case("trainer-0", NO_FILE, "missing model files", 4, "model.path"),
    "not in the cache": Case("inference-0", "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and "
                             "couldn't find them in the cached files.", "missing model files", 4, "nothing is fetched"),
    "not finite": Case("trainer-0", NAN, "loss not finite", 4, "optimizer.lr"),
    "equal rewards": Case("orchestrator-0", "InfrastructureFailure: 10 batches in a row had no trainable token: every group "
                          "has equal rewards; change the tasks or the reward", "nothing to train", 4, "too easy"),
    "other schema": Case("trainer-0", SCHEMA, "schema mismatch", 4, "one installation"),
    "missing extra": Case("inference-0", "ModuleNotFoundError: No module named 'vllm'", "missing package", 4,
                          "pip install 'prime-hpc[gpu]'"),
    "missing package": Case("orchestrator-0", "ModuleNotFoundError: No module named 'deep_ep'", "missing package", 4,
                            "the package of the module deep_ep"),
    "missing library": Case("trainer-0", "ImportError: libcudart.so.13: cannot open shared object file: No such file or "
                            "directory", "missing package", 4, "libcudart.so.13"),
    "no GPU": Case("trainer-0", "RuntimeError: Found no NVIDIA driver on your system.", "no GPU", 4, "trainer.device=cpu"),
    "broken GPU": Case("trainer-0", "RuntimeError: CUDA error: an illegal memory access was encountered", "GPU fault", 4,
                       "CUDA_LAUNCH_BLOCKING=1"),
    "host memory in Python": Case("orchestrator-0", "MemoryError: Unable to allocate 3.1 GiB", "out of host memory", 4,
                                  "--mem"),
    "host memory in torch": Case("trainer-0", "RuntimeError: [enforce fail at alloc_cpu.cpp:128] data. DefaultCPUAllocator: "
                                 "can't allocate memory: you tried to allocate 68719476736 bytes. Error code 12 (Cannot "
                                 "allocate memory)", "out of host memory", 4, "env.workers"),
    "too long": Case("inference-0", "ValueError: User-specified max_model_len (8192) is greater than the derived max_model_len "
                     "(max_position_embeddings=4096 or model_max_length=None in model's config.json).", "sequence too long",
                     4, "lower seq_len"),
    "typed": Case("orchestrator-0", "CorruptData: env-words-0 sent a RankBatch to the environment pool", "typed failure", 4,
                  "do what the message says"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_cause_line_and_remedy(name: str, tmp_path: Path) -> None:
    case, run = CASES[name], RunDir(tmp_path / "mine")
    run.failed(case.process, case.error, at=130 if case.log is DISK else 43, log=case.log)
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


def test_an_error_that_was_survived_is_not_the_cause(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    log = ("<10> ERROR   trainer-0 checkpoint 20 could not be written to /runs/mine/checkpoints (OSError(28, 'No space left on "
           "device')); there is no checkpoint yet. The run goes on; free space before the next save\n"
           "<12> WARNING trainer-0 CUDA out of memory, retrying\n"
           "Traceback (most recent call last):\n"
           "OSError: [Errno 30] Read-only file system\n"
           "<20> INFO    trainer-0 step 21 | loss 0.0035\n"
           "Traceback (most recent call last):\n"
           "  File \"loop.py\", line 3, in run\n"
           "ModuleNotFoundError: No module named 'wandb'\n")  # fmt: skip
    run.failed("trainer-0", "KeyError: 'x'", at=300, log=log)
    diagnosis = run.diagnose(now=400)
    assert (diagnosis.cause, diagnosis.evidence[0].line) == ("missing package", 8)


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
    assert diagnosis.evidence[-1].text == "node7 has 64.0 GiB of memory; the cgroup of this command counts 2 kills for want of memory"


def test_a_kill_that_the_supervisor_saw_the_kernel_do_is_want_of_memory(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    run.event("exit", at=50, process="trainer-1", exit_code=-9, oom_kills=1)
    diagnosis = run.diagnose(now=100)
    assert (diagnosis.process, diagnosis.rank, diagnosis.cause) == ("trainer-1", 1, "out of host memory")


def test_the_kill_of_a_job_step_is_read_from_slurm(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    run.log("env-words-0", "<2> INFO    env-words-0 ready\nslurmstepd: error: Detected 1 oom_kill event in StepId=30.3. Some "
            "of the step tasks have been OOM Killed.\nsrun: error: node7: task 0: Out Of Memory\n", at=50)  # fmt: skip
    run.event("exit", at=50, process="env-words-0", exit_code=137)
    diagnosis = run.diagnose(now=100)
    assert (diagnosis.cause, diagnosis.evidence[0].line) == ("out of host memory", 2)


def test_an_engine_whose_core_was_killed_is_no_riddle(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    run.failed("inference-0", ENGINE_FAILED.replace("{}", "{'EngineCore_DP0': -9}"), at=30)
    assert run.diagnose(now=60).cause == "killed"


def test_remedies_name_keys_that_exist() -> None:
    entries = [value for value in vars(cause).values() if isinstance(value, Cause)]
    texts = [entry.remedy for entry in (*entries, *causes.CAUSES, *causes.VAGUE)]
    keys = {key for text in texts for key in re.findall(r"\b(?:trainer|env|inference|checkpoint|update|run|model|optimizer)"
                                                        r"(?:\.[a-z_]+)+", text)}  # fmt: skip
    assert len(keys) > 15
    free_form = {key for key in keys if key.startswith("inference.vllm.")}
    unknown = [key for key in keys - free_form if key.split(".")[-1] not in known_keys(tuple(key.split(".")[:-1]))]
    assert unknown == []
