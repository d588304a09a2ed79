"""From a checkpoint to what other tools load: a model in Hugging Face layout, or adapters in that of PEFT.

Everything runs in one process on a CPU, file by file, so that of a large model no more than one file is in memory.
"""

import warnings
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader

from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import parse
from prime_hpc.models.lora import adapter_of
from prime_hpc.trainer.hf_weights import load_tensors, named_weights
from prime_hpc.trainer.lora import make_peft_folder, merge, peft_tensors
from prime_hpc.trainer.model import build_on_meta
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.trainer.weights_files import divide, save_tensors, write_index
from prime_hpc.trainer.weights_writer import describe_model
from prime_hpc.transport import checkpoints

CPU = torch.device("cpu")


def export(checkpoint: Path, out: Path, *, merge_lora: bool) -> list[Path]:
    """Write the model of `checkpoint` to `out`. Of a run with adapters write the adapters, or with `merge_lora` the
    model with each merged, in a folder for each where there are several. Returns the folders.

    Raises:
        CorruptData: a file of the checkpoint, or of the base model of adapters, is missing or damaged.
    """
    exporter = _Exporter(checkpoint)
    adapters = exporter.policy.lora.adapters if exporter.policy.lora else []
    if not adapters:
        return [exporter.write_model(out, None)]
    write = exporter.write_model if merge_lora else exporter.write_adapter
    return [write(out if len(adapters) == 1 else out / adapter, adapter) for adapter in adapters]


class _Exporter:
    """A checkpoint beside the model it belongs to, of which only the adapters have values."""

    def __init__(self, checkpoint: Path):
        self._checkpoint = checkpoint
        self._config = parse(checkpoints.verify(checkpoint).config)
        self.policy = _build_skeleton(self._config)
        wanted = self._config.trainer.publish_dtype
        self._dtype = self._config.trainer.dtype if wanted == "auto" else wanted
        if self.policy.lora:
            for updates in self.policy.lora.updates.values():
                updates.to_empty(device=CPU)
            self._read({name: p.data for name, p in self.policy.named_parameters() if adapter_of(name)})

    def write_model(self, out: Path, adapter: str | None) -> Path:
        """Weights, merged with an adapter where one is named, and all that makes them a model."""
        out.mkdir(parents=True)
        tensors = dict(named_weights(self.policy))
        files = divide({name: t.numel() * self._published(t).itemsize for name, t in tensors.items()})
        for file, names in files.items():
            save_tensors(self._convert({name: tensors[name] for name in names}, adapter), out / file)
        if len(files) > 1:
            write_index(out, files, tensors, self.policy.conversion)
        describe_model(out, self._config.model, self._dtype)
        return out

    def write_adapter(self, out: Path, adapter: str) -> Path:
        weights = make_peft_folder(out, self._config.lora, self._config.model.path, self.policy.conversion)
        tensors = peft_tensors(self.policy.lora, self.policy.conversion, adapter)
        save_tensors({name: t.to(getattr(torch, self._dtype)).contiguous() for name, t in tensors}, weights)
        return out

    def _convert(self, tensors: dict[str, Tensor], adapter: str | None) -> dict[str, Tensor]:
        """Tensors of the checkpoint's names, with values; a frozen parameter has those of the base model."""
        values = {name: torch.empty_like(tensor, device=CPU).detach() for name, tensor in tensors.items()}
        frozen = {name for name, tensor in tensors.items() if adapter and isinstance(tensor, nn.Parameter)}
        load_tensors({name: values[name] for name in frozen}, self.policy.conversion, Path(self._config.model.path))
        self._read({name: value for name, value in values.items() if name not in frozen})
        converted = {}
        for name, value in values.items():
            value = merge(self.policy.lora, name, value, adapter) if adapter else value
            for hf_name, part in self.policy.conversion.to_hf(name, value).items():
                converted[hf_name] = part.to(self._published(tensors[name]), copy=True).contiguous()
        return converted

    def _read(self, tensors: dict[str, Tensor]) -> None:
        """Fill tensors from the checkpoint, whatever ranks have written it."""
        if not tensors:
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is meant to be
            dcp.load({"model": tensors}, storage_reader=FileSystemReader(self._checkpoint), no_dist=True)

    def _published(self, tensor: Tensor) -> torch.dtype:
        return getattr(torch, self._dtype) if isinstance(tensor, nn.Parameter) else tensor.dtype


def _build_skeleton(config: RunConfig) -> PolicyModel:
    """The run's model without storage; its attention is that of this machine, as nothing is computed."""
    return build_on_meta(replace(config, trainer=replace(config.trainer, attn="auto")), CPU)
