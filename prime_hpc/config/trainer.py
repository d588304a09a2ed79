"""Configuration of the trainer."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from prime_hpc.config.sections import FORBID_UNKNOWN, NonNegative, Positive, Seconds, UserPath


@dataclass(kw_only=True)
class SFTProbe:
    """Sampled exact match on held-out rows during SFT: a stop rule for warm-ups."""

    __pydantic_config__ = FORBID_UNKNOWN

    every: NonNegative = 0
    """Steps between probes; 0 turns the probe off."""
    prompts: Positive = 128
    """Held-out rows that are sampled, from the end of the data (of its last file)."""
    max_tokens: Positive = 32
    """Tokens of one reply."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature of the probe."""
    stop_at: Annotated[float, Field(ge=0, le=1)] | None = None
    """Training ends when the exact match first reaches this."""


@dataclass(kw_only=True)
class SFTFile:
    """A file of rows."""

    __pydantic_config__ = FORBID_UNKNOWN

    path: UserPath
    """JSONL or parquet (by its suffix): a `messages` list a row, or `prompt` and `completion`, and `tools` beside."""
    share: Annotated[float, Field(gt=0)] | None = None
    """Share of the rows that are trained, relative to the shares of the other files; by default every file is trained
    once an epoch."""


def _as_files(given: Any) -> Any:
    """A path, or a list of paths, stands for files without shares."""
    files = ([given] if given else []) if isinstance(given, str) else given
    return [{"path": file} if isinstance(file, str) else file for file in files] if isinstance(files, list) else given


SFTFiles = Annotated[list[SFTFile], BeforeValidator(_as_files)]
"""Files of rows; the path of one is enough."""


@dataclass(kw_only=True)
class SFTValidation:
    """Loss and accuracy on rows that are not trained, those of `data` or of the end of `trainer.sft.data`."""

    __pydantic_config__ = FORBID_UNKNOWN

    every: NonNegative = 0
    """Steps between validations; the last step is validated in any case. 0 turns them off."""
    data: SFTFiles = field(default_factory=list)
    """Files of rows, which are all taken."""
    rows: NonNegative = 0
    """Without files: so many rows from the end of `trainer.sft.data`, of its last file."""


@dataclass(kw_only=True)
class SFTConfig:
    """Supervised fine-tuning over the same loop (`mode: sft`)."""

    __pydantic_config__ = FORBID_UNKNOWN

    data: SFTFiles = field(default_factory=list)
    """Rows to train: the path of a file, or a list of files with their shares."""
    batch_size: Positive = 128
    """Rows a step, over all ranks."""
    shuffle: bool = True
    """New order every epoch, from `seed`."""
    roles: Annotated[list[Literal["system", "user", "assistant", "tool"]], Field(min_length=1)] = field(
        default_factory=lambda: ["assistant"]
    )
    """Whose messages are trained: the assistant's with what ends them, of the others the text alone."""
    last_reply_only: bool = False
    """Of the assistant's messages train the last of a row alone."""
    validation: SFTValidation = field(default_factory=SFTValidation)
    """Loss and accuracy on other rows."""
    probe: SFTProbe = field(default_factory=SFTProbe)
    """Exact match on held-out rows."""

    @property
    def held_out(self) -> int:
        """Rows at the end of the last file of `data` that are not trained."""
        return max(self.validation.rows, self.probe.prompts if self.probe.every else 0)


@dataclass(kw_only=True)
class ReplayConfig:
    """Training on what another run recorded (`mode: replay`)."""

    __pydantic_config__ = FORBID_UNKNOWN

    rollouts: UserPath = ""
    """The `rollouts` folder of a run; step n trains its batch n."""
    until: Positive | None = None
    """Last step; `max_steps`, by which the learning rate goes, when left out."""


@dataclass(kw_only=True)
class BenchConfig:
    """The trainer alone (`mode: bench`) on made-up samples of at most `seq_len` tokens, and with random weights."""

    __pydantic_config__ = FORBID_UNKNOWN

    rows: Positive = 1
    """Packed rows a step and rank."""
    warmup: NonNegative = 3
    """First steps that no figure counts: compilation, allocation, choice of kernels."""
    spread: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of the logarithm of lengths, whose median is half of `seq_len`; at 0 all are of `seq_len`."""


@dataclass(kw_only=True)
class ParallelConfig:
    """How the ranks divide model and batch; every degree that is left out follows from the others."""

    __pydantic_config__ = FORBID_UNKNOWN

    dp_replicate: Positive = 1
    """Copies of the sharded model (hybrid sharding), each on ranks / dp_replicate neighbouring ranks."""
    cp: Positive = 1
    """Ranks that divide each packed row (context parallelism)."""
    cp_style: Literal["ulysses", "ring"] = "ulysses"
    """ulysses exchanges heads for tokens around attention, at most one rank for each query head; ring passes keys and
    values on."""
    tp: Positive = 1
    """Ranks that divide attention heads and channels of dense MLPs (tensor parallelism)."""
    ep: Positive | Literal["auto"] = 1
    """Ranks that divide the experts, within those that share a copy of the model; auto takes the largest number that
    divides both and fits a node."""
    ep_dispatch: Literal["all_to_all", "deepep"] = "all_to_all"
    """How tokens reach the ranks of their experts: a row for each expert by a collective, or each token once to every
    rank that has some of its experts, by the kernels of DeepEP where it is installed."""


@dataclass(kw_only=True)
class ProfileConfig:
    """Profiles of a few steps, written to `profile/` in the run directory."""

    __pydantic_config__ = FORBID_UNKNOWN

    steps: NonNegative = 0
    """Steps in a row that are profiled; 0 profiles none."""
    start: Positive = 3
    """The first of them; steps 1 and 2 allocate and compile what later ones find ready."""
    ranks: list[NonNegative] | None = field(default_factory=lambda: [0])
    """Ranks that write a profile; null for all."""
    memory: bool = False
    """Record allocations too: in the trace, and on a GPU as a snapshot of its memory with the stack of each."""


@dataclass(kw_only=True)
class TrainerConfig:
    """The trainer ranks."""

    __pydantic_config__ = FORBID_UNKNOWN

    ranks: Positive | None = None
    """Processes; one GPU each where there are GPUs. By default 1, under Slurm every GPU of the trainer's nodes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where there is a GPU."""
    share_gpu: bool | None = None
    """Put trainer ranks on the engines' GPUs; by default only where there are too few GPUs for both."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Division of model and batch among the ranks."""
    attn: Literal["auto", "flash_attention_2", "flash_attention_3", "flash_attention_4", "varlen", "sdpa", "eager"] = (
        "auto"
    )
    """auto: the fastest that runs here. varlen and sdpa are torch's own, eager is that of transformers."""
    linear_attn: Literal["auto", "fla", "torch"] = "auto"
    """Kernels of gated delta rules. fla: flash-linear-attention, which auto takes in half precision on a GPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Computation in forward and backward; parameters and optimiser states stay in float32."""
    publish_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights as the engines get them; auto is `dtype`."""
    micro_batch_tokens: Positive | None = None
    """Tokens of one packed row; seq_len when left out."""
    head_chunk_tokens: Positive = 1024
    """Tokens whose logits exist at once; full logits never do."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes anew of every block: nothing, all but matrix products and attention, or all."""
    activation_checkpointing_every: Positive = 1
    """Only of every n-th block, from the first on; the others keep all, as far as memory reaches."""
    activation_offload: NonNegative = 0
    """Move kept activations to host memory, this many on their way at once; 0 leaves them on the GPU."""
    optimizer_offload: bool = False
    """Keep optimiser states in host memory between steps."""
    reshard_after_forward: bool | None = None
    """Free a block's gathered weights until its backward pass; by default where several ranks share them."""
    gather_once: bool = False
    """Gather weights and reduce gradients once a step rather than for every micro-batch, with both whole on every rank
    meanwhile: 6 bytes a parameter."""
    fp8: bool = False
    """FP8 products in the linear layers of the blocks (torchao, rows scaled each by itself), which need a GPU of
    compute capability 8.9 or newer."""
    fp8_experts: bool = False
    """With `fp8` in the experts too, on Hopper: slower than bfloat16 for the sizes that were measured."""
    compile: bool = False
    """torch.compile each block."""
    router_bias_rate: Annotated[float, Field(ge=0)] = 0.0
    """Move of the routers' score-correction biases towards even load after a step; 0 leaves them as they are."""
    router_replay: bool = False
    """Compute every token by the experts that computed it when it was sampled; engines record and send them."""
    self_check: bool = True
    """Before training, hold the scores of a model of transformers against those of its own forward, one document at a
    time."""
    max_skipped_steps: NonNegative = 5
    """Steps skipped for a loss or gradient that is not finite, in a row, after which the run stops."""
    threads: Positive | None = None
    """CPU threads of a rank; cores divided by ranks when left out."""
    batch_timeout_s: Seconds = 3600.0
    """Deadline of the wait for a batch; `env.eval.hold_s` is added to it."""
    collective_timeout_s: Seconds = 600.0
    """Deadline of a collective among ranks."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Profiles of a few steps."""
    sft: SFTConfig = field(default_factory=SFTConfig)
    """mode=sft."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """mode=replay."""
    bench: BenchConfig = field(default_factory=BenchConfig)
    """mode=bench."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the ranks."""
