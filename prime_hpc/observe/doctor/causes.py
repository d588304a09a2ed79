"""The table of causes. Order is priority: where several speak from one log, the first is the reason and the others its
consequences; those of `VAGUE` count only where none of `CAUSES` does."""

import signal

from prime_hpc.observe.doctor.cause import (
    COLLECTIVE_TIMEOUT,
    ENGINE_DIED,
    ERROR_BUDGET,
    KILLED,
    NODE_FAILURE,
    OUT_OF_HOST_MEMORY,
    PEER_LOST,
    PREEMPTED,
    SUPERVISOR_LOST,
    TIME_LIMIT,
    died,
    told,
)

CUDA_OUT_OF_MEMORY = r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError"

JOB_CAUSES = (TIME_LIMIT, PREEMPTED, NODE_FAILURE)
"""What the scheduler does to a whole job; it says so in any log of the attempt."""

MEMORY_CAUSES = (
    OUT_OF_HOST_MEMORY,
    told(
        "CUDA out of memory",
        CUDA_OUT_OF_MEMORY,
        "{process} ran out of GPU memory",
        "lower trainer.micro_batch_tokens or trainer.head_chunk_tokens, set trainer.activation_checkpointing=full, or "
        "take more trainer.ranks; beside an engine, lower inference.vllm.gpu_memory_utilization",
        component="trainer",
    ),
    told(
        "CUDA out of memory",
        CUDA_OUT_OF_MEMORY,
        "{process} ran out of GPU memory",
        "lower inference.vllm.gpu_memory_utilization or inference.vllm.max_num_seqs, or spread the model with "
        "inference.vllm.tensor_parallel_size",
    ),
    told(
        "GPU memory taken",
        r"Free memory on device .*is less than desired GPU memory utilization",
        "{process} found the memory of its GPU taken by another process",
        "end what else runs there (nvidia-smi lists it), or lower inference.vllm.gpu_memory_utilization",
    ),
    told(
        "KV cache too small",
        r"To serve at least one request with the models?'s max seq len|No available memory for the cache blocks",
        "{process} has too little memory for the KV cache of a single sequence",
        "lower seq_len (or inference.vllm.max_model_len), or give the cache more with "
        "inference.vllm.gpu_memory_utilization, inference.vllm.kv_cache_memory_bytes or "
        "inference.vllm.tensor_parallel_size",
    ),
)

DATA_CAUSES = (
    told(
        "disk full",
        r"No space left on device|Disk quota exceeded|\[Errno (?:28|122)\]",
        "{process} found the disk full",
        "free space or quota where the evidence says; checkpoint.keep_last and update.keep_versions bound what a run "
        "keeps",
    ),
    told(
        "not writable",
        r"Read-only file system|PermissionError|\[Errno (?:13|30)\]",
        "{process} may not write where it has to",
        "make the folder in the evidence writable from every node, or choose another run.output_dir",
    ),
    told(
        "corrupt checkpoint",
        r"CorruptData: .*(?:resume from another checkpoint|does not fit this model|journal)",
        "{process} cannot read its checkpoint",
        "resume from an older one: python -m prime_hpc.resume {run} resume=STEP",
    ),
    told(
        "corrupt weights",
        r"SafetensorError|CorruptData: .*(?:its manifest says|does not match its digest|holds no tensor|has shape"
        r"|refused load|differs from|contradicts itself|no readable manifest|did not acknowledge|loaded different)",
        "{process} met weights that are damaged or of another model",
        "if they are those of model.path, fetch the model again (a file of a few hundred bytes is a pointer of Git "
        "LFS); if they lie in the run directory, look for errors of the file system",
    ),
    told(
        "schema mismatch",
        r"SchemaMismatch: (?P<what>.*)",
        "{process} met data of another version of prime_hpc: {what}",
        "start every process from one installation; resume a run with the version that began it",
    ),
)

LEARNING_CAUSES = (
    told(
        "loss not finite",
        r"steps in a row up to step (?P<step>\d+) had a loss or gradient that is not finite",
        "{process} gave up at step {step}: loss or gradient were not finite too often",
        "go back before the trouble with resume=STEP; lower optimizer.lr needs a new run, trainer.dtype=float32 too",
    ),
    told(
        "nothing to train",
        r"batches in a row had no trainable token: (?P<what>.*?)(?:; change the tasks|\n|$)",
        "many batches had nothing to train: {what}",
        "change the tasks or the reward: too easy and too hard tasks carry no advantage",
    ),
    told(
        "environment does not load",
        r"EnvironmentFailure: (?P<what>source .*(?:does not load: .*|has no task.*))",
        "an environment does not load: {what}",
        "mend the environment or its args, then try it alone with max_steps=1",
    ),
    ERROR_BUDGET,
    told(
        "environment blocks",
        r"Environment code must not block its event loop",
        "code of the environment blocked the event loop of {process}",
        "use await, or asyncio.to_thread around code that computes or waits; the stacks in its log show where",
    ),
)

SETTING_CAUSES = (
    told(
        "no chat template",
        r"chat_template is not set|a tokenizer with a chat template",
        "the tokenizer has no chat template",
        "choose a model.tokenizer that has one (chat_template.jinja), or a model.renderer",
    ),
    told(
        "missing model files",
        r"does not appear to have a file named|no file named \S+|Can't load the (?:configuration|tokenizer|model)"
        r"|couldn't find them in the cached files|Unrecognized model in|Couldn't instantiate the backend tokenizer"
        r"|a directory with (?:weights in safetensors|a tokenizer)"
        r"|FileNotFoundError.*(?:config\.json|tokenizer|safetensors)",
        "{process} does not find all files of the model",
        "let model.path (and model.tokenizer) name a complete directory in Hugging Face layout that every node sees; "
        "nothing is fetched while a run works",
    ),
    told(
        "sequence too long",
        r"max_model_len \((?P<length>\d+)\) is greater than the derived max_model_len",
        "{process} refuses sequences of {length} tokens: the model was not made for them",
        "lower seq_len or inference.vllm.max_model_len",
    ),
    told(
        "configuration",
        r"ConfigurationError: |ValidationError: \d+ validation errors? for|unrecognized arguments",
        "{process} refuses its configuration",
        "mend the keys in the evidence",
    ),
    told(
        "missing package",
        r"ModuleNotFoundError: No module named '(?P<module>\w+)|ImportError: (?P<what>.*)",
        "{process} cannot import what it needs",
        "install it where the processes run: {install}",
    ),
)

MACHINE_CAUSES = (
    told(
        "no GPU",
        r"Torch not compiled with CUDA enabled|No CUDA GPUs are available|no NVIDIA driver|Failed to infer device type"
        r"|CUDA driver version is insufficient|no CUDA-capable device",
        "{process} finds no GPU that it can use",
        "look at nvidia-smi on its node and at the build of torch, or set trainer.device=cpu",
    ),
    told(
        "GPU fault",
        r"CUDA error: (?:an illegal memory access|uncorrectable|unspecified launch failure|device-side assert)"
        r"|ECC error",
        "{process} met a fault of its GPU or of a kernel",
        "resume; if it comes again on that node, leave the node out; if it comes elsewhere too, set "
        "CUDA_LAUNCH_BLOCKING=1 in trainer.env or inference.env, and the traceback shows the kernel",
    ),
    told(
        "port in use",
        r"EADDRINUSE|[Aa]ddress already in use",
        "{process} found its port taken",
        "leave the port out of the configuration, so that the system picks a free one, or end what holds it",
    ),
    KILLED,
    died(
        "crash",
        signal.SIGSEGV,
        "{process} crashed in native code (SIGSEGV)",
        "resume; if it comes again, look at the end of its log and at the versions of torch, vllm and the driver",
    ),
    died(
        "crash",
        signal.SIGBUS,
        "{process} lost memory that it had mapped (SIGBUS)",
        "look for a full /dev/shm, or for a file that was cut meanwhile",
    ),
)

SYMPTOMS = (
    told(
        "deadline exceeded",
        r"DeadlineExceeded: (?P<waiter>\S+) waited (?P<seconds>\d+) s for (?P<what>.+) from (?P<owner>[^\s;]+)",
        "{waiter} waited {seconds} s for {what}, and {process} did not deliver",
        "see what {process} was doing in its log; if it is only slow, raise the deadline of that wait",
        symptom=True,
    ),
    told(
        "engine does not answer",
        r"InferenceFailure: (?P<owner>inference-\d+) (?:did not answer|answered) (?P<what>\w+)",
        "{process} did not answer {what}",
        "see its log; if it is only slow, raise update.timeout_s",
        symptom=True,
    ),
    COLLECTIVE_TIMEOUT,
    PEER_LOST,
    told(
        "superseded",
        r"attempt (?P<newer>\d+) has taken over",
        "attempt {newer} took over from this one",
        "nothing is wrong, if the newer attempt was meant: python -m prime_hpc.doctor {run}",
    ),
    SUPERVISOR_LOST,
)

CAUSES = (
    *JOB_CAUSES,
    *MEMORY_CAUSES,
    *DATA_CAUSES,
    *LEARNING_CAUSES,
    *SETTING_CAUSES,
    *MACHINE_CAUSES,
    *SYMPTOMS,
)

VAGUE = (
    ENGINE_DIED,
    told(
        "connection lost",
        r"BrokenPipeError|ConnectionResetError|ConnectionRefusedError|ConnectError",
        "{process} lost a connection",
        "see which process it spoke to, and that one's log",
        symptom=True,
    ),
    told(
        "typed failure",
        r"(?:InfrastructureFailure|InferenceFailure|EnvironmentFailure|CorruptData): (?P<what>.*)",
        "{process} failed: {what}",
        "do what the message says",
    ),
    died(
        "terminated",
        signal.SIGTERM,
        "{process} was told to end (SIGTERM), and not by its supervisor",
        "look for scancel, preemption or a kill by hand",
    ),
    died("interrupted", signal.SIGINT, "{process} was interrupted", "nothing is wrong with the run"),
    died("crash", signal.SIGABRT, "{process} aborted (SIGABRT)", "read the last lines of its log"),
)
