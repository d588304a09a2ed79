"""Why processes fail: a table of causes, each with the words or exit codes that give it away and what to do about it.

Order is priority: where several causes speak from one log, the first of the table is the reason and the others its
consequences; a cause of `VAGUE` counts only where none of `CAUSES` does. Texts may name `{process}`, `{run}`, `{error}`
(its last error), `{install}` and the groups of the pattern.
"""

import re
import signal
from dataclasses import dataclass

from prime_hpc.cluster.role import EXIT_FENCED

EXTRAS = {"vllm": "gpu", "wandb": "wandb", "matplotlib": "plot", "hydra_plugins": "sweep", "gguf": "gguf",
          "accelerate": "gguf"}  # fmt: skip
"""Modules that an extra of this product installs."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One way to fail.

    `pattern` is searched in error texts and in log lines; `codes` are exit codes, where no pattern speaks. A `symptom`
    follows from what another process did; its pattern names that one as `owner` where it can.
    """

    name: str
    says: str
    remedy: str
    pattern: re.Pattern[str] | None = None
    codes: tuple[int, ...] = ()
    component: str | None = None
    symptom: bool = False


def _cause(name: str, pattern: str, says: str, remedy: str, *, component: str | None = None,
           symptom: bool = False) -> Cause:  # fmt: skip
    return Cause(name=name, pattern=re.compile(pattern), says=says, remedy=remedy, component=component, symptom=symptom)


def _died(name: str, code: int, says: str, remedy: str, *, symptom: bool = False) -> Cause:
    return Cause(name=name, codes=(code,), says=says, remedy=remedy, symptom=symptom)


OUT_OF_HOST_MEMORY = _cause(
    "out of host memory",
    r"oom[-_]kill event|: Out Of Memory\b|xceeded (?:step|job) memory limit|\bMemoryError\b|Cannot allocate memory"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory",
    "{process} ran out of host memory",
    "give the job more memory (`--mem` on Slurm), or need less: fewer env.workers or env.rollouts_per_worker, a smaller "
    "trainer.micro_batch_tokens, fewer processes on the node",
)
TIME_LIMIT = _cause(
    "time limit",
    r"DUE TO TIME LIMIT",
    "the job reached its time limit",
    "ask for more time, or save more often with checkpoint.every",
)
PREEMPTED = _cause(
    "preemption",
    r"DUE TO PREEMPTION",
    "the job was preempted",
    "nothing is wrong with the run; a smaller checkpoint.every loses less",
)
NODE_FAILURE = _cause(
    "node failure",
    r"DUE TO NODE FAILURE",
    "a node of the job failed",
    "leave the node out (`--exclude` on Slurm) and tell its administrators",
)
JOB_CAUSES = (TIME_LIMIT, PREEMPTED, NODE_FAILURE)
"""What the scheduler does to a whole job; it says so in any log of the attempt."""

KILLED = _died(
    "killed",
    -signal.SIGKILL,
    "{process} was killed by SIGKILL",
    "most often the kernel ran out of memory: look at the memory of the node and give the job more, or need less with "
    "fewer env.workers or a smaller trainer.micro_batch_tokens; otherwise somebody killed it by hand",
)
COLLECTIVE_TIMEOUT = _cause(
    "collective time-out",
    r"Watchdog caught collective operation timeout: .*OpType=(?P<what>\w+)"
    r"|Timed out waiting \d+ms for (?P<way>recv|send) operation to complete|wait timeout after \d+ms, keys",
    "{process} did not come to a collective that the other ranks waited for",
    "see what that rank was doing in its log; if it is only slow, raise trainer.collective_timeout_s",
    symptom=True,
)
PEER_LOST = _cause(
    "peer lost",
    r"gloo.*(?:Connection reset by peer|Connection closed by peer|Broken pipe)|ncclRemoteError|ncclSystemError"
    r"|remote process exited or there was a network error|closed by remote peer|NCCL communicator was aborted"
    r"|TCPStore.*(?:Broken pipe|Connection reset|recvValue)|Heartbeat monitor timed out"
    r"|The client socket has timed out",
    "{process} was lost to the other ranks, without a word of its own",
    "look at its node and at the network between the nodes",
    symptom=True,
)
DEADLINE = _cause(
    "deadline exceeded",
    r"DeadlineExceeded: (?P<waiter>\S+) waited (?P<seconds>\d+) s for (?P<what>.+) from (?P<owner>[^\s;]+)",
    "{waiter} waited {seconds} s for {what}, and {process} did not deliver",
    "see what {process} was doing in its log; if it is only slow, raise the deadline of that wait",
    symptom=True,
)
SUPERVISOR_LOST = Cause(
    name="supervisor lost",
    pattern=re.compile(r"leaving: the supervisor gave no sign"),
    codes=(EXIT_FENCED,),
    says="the supervisor gave no sign any more, and every process left",
    remedy="find out what ended it: a closed terminal, a failed node or a cancelled job",
    symptom=True,
)
SUPERSEDED = _cause(
    "superseded",
    r"attempt (?P<newer>\d+) has taken over",
    "attempt {newer} took over from this one",
    "nothing is wrong, if the newer attempt was meant: python -m prime_hpc.doctor {run}",
)
STOPPED = Cause(
    name="stopped",
    says="the run was stopped: {reason}",
    remedy="nothing is wrong with the run",
)
COLLECTIVE_STUCK = Cause(
    name="collective time-out",
    says="every rank came to a collective, and it did not end in time",
    remedy="look at the network between the nodes (NCCL_DEBUG=INFO in trainer.env says what it uses), or raise "
    "trainer.collective_timeout_s",
)
ENGINE_SILENT = _cause(
    "engine does not answer",
    r"InferenceFailure: (?P<owner>inference-\d+) (?:did not answer|answered) (?P<what>\S+)",
    "{process} did not answer {what}",
    "see its log; if it is only slow, raise update.timeout_s",
    symptom=True,
)
HANG = Cause(
    name="hang",
    says="{process} makes no progress, and everybody waits for it",
    remedy="see what it was doing in its log (kill -USR2 PID prints the stacks of a live process there)",
)
UNCAUGHT = Cause(
    name="uncaught error",
    says="{process} failed: {error}",
    remedy="read the traceback in its log",
)

CAUSES = (
    *JOB_CAUSES,
    OUT_OF_HOST_MEMORY,
    _cause(
        "CUDA out of memory",
        r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError",
        "{process} ran out of GPU memory",
        "lower trainer.micro_batch_tokens or trainer.head_chunk_tokens, set trainer.activation_checkpointing=true, or take "
        "more trainer.ranks; beside an engine, lower inference.vllm.gpu_memory_utilization",
        component="trainer",
    ),
    _cause(
        "CUDA out of memory",
        r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError",
        "{process} ran out of GPU memory",
        "lower inference.vllm.gpu_memory_utilization or inference.vllm.max_num_seqs, or spread the model with "
        "inference.vllm.tensor_parallel_size",
    ),
    _cause(
        "GPU memory taken",
        r"Free memory on device .*is less than desired GPU memory utilization",
        "{process} found the memory of its GPU taken by another process",
        "end what else runs there (nvidia-smi lists it), or lower inference.vllm.gpu_memory_utilization",
    ),
    _cause(
        "KV cache too small",
        r"To serve at least one request with the models?'s max seq len \((?P<length>\d+)\)"
        r"|No available memory for the cache blocks",
        "{process} has too little memory for the KV cache of a single sequence",
        "lower seq_len (or inference.vllm.max_model_len), or give the cache more: inference.vllm.gpu_memory_utilization, "
        "inference.vllm.kv_cache_memory_bytes, or inference.vllm.tensor_parallel_size",
    ),
    _cause(
        "disk full",
        r"No space left on device|Disk quota exceeded|\[Errno (?:28|122)\]",
        "{process} found the disk full",
        "free space or quota where the evidence says; checkpoint.keep_last and update.keep_versions bound what a run keeps",
    ),
    _cause(
        "not writable",
        r"Read-only file system|PermissionError|\[Errno (?:13|30)\]",
        "{process} may not write where it has to",
        "make the folder in the evidence writable from every node, or choose another run.output_dir",
    ),
    _cause(
        "loss not finite",
        r"steps in a row up to step (?P<step>\d+) had a loss or gradient that is not finite",
        "{process} gave up at step {step}: loss or gradient were not finite too often",
        "resume from an earlier checkpoint with a lower optimizer.lr, or with trainer.dtype=float32",
    ),
    _cause(
        "nothing to train",
        r"batches in a row had no trainable token",
        "every group of many batches had equal rewards, so there was nothing to train",
        "change the tasks or the reward: too easy and too hard tasks carry no advantage",
    ),
    _cause(
        "corrupt checkpoint",
        r"CorruptData: .*(?:resume from another checkpoint|does not fit this model|journal)",
        "{process} cannot read its checkpoint",
        "resume from an older one: python -m prime_hpc.resume {run} resume=STEP",
    ),
    _cause(
        "corrupt weights",
        r"SafetensorError|CorruptData: .*(?:its manifest says|does not match its digest|holds no tensor|has shape|refused "
        r"load|differs from|contradicts itself|no readable manifest|did not acknowledge|loaded different data)",
        "{process} met weights that are damaged or of another model",
        "if they are those of model.path, fetch the model again (a file of a few hundred bytes is a pointer of Git LFS); "
        "if they lie in the run directory, look for errors of the file system",
    ),
    _cause(
        "environment does not load",
        r"EnvironmentFailure: (?P<what>source .*(?:does not load: .*|has no task.*))",
        "an environment does not load: {what}",
        "mend the environment or its args, then try it alone with max_steps=1",
    ),
    _cause(
        "error budget",
        r"EnvironmentFailure: (?P<what>\d+% of the last \d+ episodes of \S+ failed)",
        "too many episodes failed in their environment: {what}",
        "mend what the last error says; rollouts that failed lie in rollouts/step_N.jsonl.zst; env.error_budget allows more",
    ),
    _cause(
        "environment blocks",
        r"Environment code must not block its event loop",
        "code of the environment blocked the event loop of {process}",
        "use await, or asyncio.to_thread around code that computes or waits; the stacks in its log show where",
    ),
    _cause(
        "no chat template",
        r"chat_template is not set|a tokenizer with a chat template",
        "the tokenizer has no chat template",
        "choose a model.tokenizer that has one (chat_template.jinja), or a model.renderer",
    ),
    _cause(
        "missing model files",
        r"does not appear to have a file named|no file named \S+|Can't load the (?:configuration|tokenizer|model)"
        r"|couldn't find them in the cached files|Unrecognized model in|Couldn't instantiate the backend tokenizer"
        r"|has neither model\.safetensors nor|FileNotFoundError.*(?:config\.json|tokenizer|safetensors)",
        "{process} does not find all files of the model",
        "let model.path (and model.tokenizer) name a complete directory in Hugging Face layout that every node sees; "
        "nothing is fetched while a run works",
    ),
    _cause(
        "schema mismatch",
        r"SchemaMismatch: (?P<what>.*)",
        "{process} met data of another version of prime_hpc: {what}",
        "start every process from one installation; resume a run with the version that began it",
    ),
    _cause(
        "sequence too long",
        r"max_model_len \((?P<length>\d+)\) is greater than the derived max_model_len",
        "{process} refuses sequences of {length} tokens: the model was not made for them",
        "lower seq_len or inference.vllm.max_model_len",
    ),
    _cause(
        "configuration",
        r"ConfigurationError: |ValidationError: \d+ validation errors? for|unrecognized arguments",
        "{process} refuses its configuration",
        "mend the keys in the evidence",
    ),
    _cause(
        "missing package",
        r"ModuleNotFoundError: No module named '(?P<module>\w+)|ImportError: (?P<what>.*)",
        "{process} cannot import what it needs",
        "install it where the processes run: {install}",
    ),
    _cause(
        "no GPU",
        r"Torch not compiled with CUDA enabled|No CUDA GPUs are available|no NVIDIA driver|Failed to infer device type"
        r"|CUDA driver version is insufficient|no CUDA-capable device",
        "{process} finds no GPU that it can use",
        "look at nvidia-smi on its node and at the build of torch, or set trainer.device=cpu",
    ),
    _cause(
        "GPU fault",
        r"CUDA error: (?P<what>an illegal memory access|uncorrectable|unspecified launch failure|device-side assert)"
        r"|ECC error",
        "{process} met a fault of its GPU or of a kernel",
        "once: resume; again on the same node: leave it out; again elsewhere: run with trainer.env={{CUDA_LAUNCH_BLOCKING: 1}}",
    ),
    _cause(
        "port in use",
        r"EADDRINUSE|[Aa]ddress already in use",
        "{process} found its port taken",
        "leave the port out of the configuration, so that the system picks a free one; or end what holds it",
    ),
    KILLED,
    _died("crash", -signal.SIGSEGV, "{process} crashed in native code (SIGSEGV)", "resume; if it comes again, look at the "
          "last lines of its log and at the versions of torch, vllm and the driver"),  # fmt: skip
    _died("crash", -signal.SIGBUS, "{process} crashed on memory that went away (SIGBUS)", "look for a full /dev/shm, or "
          "for a file that was cut while it was mapped"),  # fmt: skip
    DEADLINE,
    ENGINE_SILENT,
    COLLECTIVE_TIMEOUT,
    PEER_LOST,
    SUPERSEDED,
    SUPERVISOR_LOST,
)  # fmt: skip

VAGUE = (
    _cause(
        "engine died",
        r"Engine core initialization failed|EngineDeadError|EngineCore encountered|the engine process died|vLLM failed: ",
        "the engine of {process} died without saying why",
        "read its log; a cause that is missing there is often the out-of-memory killer",
        symptom=True,
    ),
    _cause(
        "connection lost",
        r"BrokenPipeError|ConnectionResetError|ConnectionRefusedError|ConnectError",
        "{process} lost a connection",
        "see which process it spoke to, and that one's log",
        symptom=True,
    ),
    _died("terminated", -signal.SIGTERM, "{process} was told to end (SIGTERM) by somebody who is not its supervisor",
          "look for scancel, preemption or a kill by hand"),  # fmt: skip
    _died("interrupted", -signal.SIGINT, "{process} was interrupted", "resume"),
    _died("crash", -signal.SIGABRT, "{process} aborted (SIGABRT)", "read the last lines of its log"),
    _cause(
        "typed failure",
        r"(?:InfrastructureFailure|InferenceFailure|EnvironmentFailure|CorruptData): (?P<what>.*)",
        "{process} failed: {what}",
        "do what the message says",
    ),
)  # fmt: skip


def how_to_install(groups: dict[str, str]) -> str:
    """The command that brings the module of a failed import."""
    if module := groups.get("module"):
        extra = EXTRAS.get(module)
        return f"pip install 'prime-hpc[{extra}]'" if extra else f"the package of the module {module}"
    return groups.get("what", "")
