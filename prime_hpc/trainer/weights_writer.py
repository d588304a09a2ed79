"""Policy versions for the engines, and the final model: whole tensors in Hugging Face names, written by all ranks."""

import json
import math
import re
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from prime_hpc.cluster.files import list_fresh, read_json
from prime_hpc.cluster.role import Role
from prime_hpc.config.sections import ModelConfig
from prime_hpc.models.conversion import Conversion
from prime_hpc.trainer.distributed import World
from prime_hpc.trainer.hf_weights import INDEX, SINGLE, named_weights
from prime_hpc.trainer.lora import make_peft_folder, merge, peft_tensors, whole
from prime_hpc.trainer.model import PolicyModel
from prime_hpc.transport import weights
from prime_hpc.transport.messages import PolicyVersion

FILE_BYTES = 2 * 2**30
"""Size of one safetensors file, about: what a rank holds at once while it writes."""
TOKENIZER_SUFFIXES = (".json", ".jinja", ".txt", ".model")


class WeightsWriter:
    """Every rank takes part in every call, since every tensor is gathered from all ranks."""

    def __init__(self, role: Role, world: World, policy: PolicyModel):
        self._role, self._world, self._policy = role, world, policy
        config = role.config
        wanted = config.trainer.publish_dtype
        self._dtype = config.trainer.dtype if wanted == "auto" else wanted
        self._keep = config.update.keep_versions
        self._adapters_only = bool(config.lora.served)

    def publish(self, version: PolicyVersion) -> None:
        """Write, seal and announce `weights/vL.S`, then remove versions that nobody needs any more."""
        final = self._role.paths.weights_version(str(version))
        partial = final.with_name(f".{final.name}.partial")
        self._role.reach("update.before")
        if self._adapters_only:
            self._write_adapters(partial)
        else:
            self._write(partial)
        self._role.reach("update.during")
        if self._world.first:
            self._role.lease.check()
            self._role.patience.write(final.name, lambda: weights.seal(partial, version, self._dtype))
            weights.publish(partial, final)
            self._clean_up()

    def export(self) -> None:
        """Write `model/` in the run directory: weights, config and tokenizer, ready for any Hugging Face tool.

        Of adapters write `adapters/`, and `model/` only with a single one, which is merged.
        """
        root, lora = self._role.paths.root, self._policy.lora
        if lora is None or len(lora.adapters) == 1:
            self._write(root / ".model.partial")
            if self._world.first:
                describe_model(root / ".model.partial", self._role.config.model, self._dtype)
            self._put(root / ".model.partial", root / "model")
        if lora:
            self._write_adapters(root / ".adapters.partial")
            self._put(root / ".adapters.partial", root / "adapters")

    def _put(self, partial: Path, final: Path) -> None:
        if self._world.first:
            self._role.lease.check()
            weights.publish(partial, final)
        dist.barrier()

    def _write_adapters(self, directory: Path) -> None:
        """Fill a new `directory` with a folder for each adapter. They are small, so that rank 0 writes them."""
        if self._world.first:
            shutil.rmtree(directory, ignore_errors=True)
        config, policy, dtype = self._role.config, self._policy, getattr(torch, self._dtype)
        for adapter in policy.lora.adapters:
            tensors = {name: tensor.to("cpu", dtype, copy=True).contiguous()
                       for name, tensor in peft_tensors(policy.lora, policy.conversion, adapter)}  # fmt: skip
            if self._world.first:
                path = make_peft_folder(directory / adapter, config.lora, config.model.path)
                self._role.patience.write(path.name, lambda path=path, tensors=tensors: save_tensors(tensors, path))

    def _write(self, directory: Path) -> None:
        """Fill a new `directory`; returns on every rank once all files are there."""
        if self._world.first:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        dist.barrier()
        tensors = dict(named_weights(self._policy))
        files = divide({name: t.numel() * self._published(t).itemsize for name, t in tensors.items()})
        for i, (file, names) in enumerate(files.items()):
            self._write_file(directory / file, {name: tensors[name] for name in names},
                             mine=i % self._world.size == self._world.rank)  # fmt: skip
        if self._world.first and len(files) > 1:
            write_index(directory, files, tensors, self._policy.conversion)
        dist.barrier()

    def _write_file(self, path: Path, tensors: dict[str, Tensor], *, mine: bool) -> None:
        """Gather the tensors one by one; the rank whose file it is keeps them and writes it."""
        kept = {}
        for name, tensor in tensors.items():
            values = whole(tensor)
            if self._policy.lora:
                values = merge(self._policy.lora, name, values, self._policy.lora.adapters[0])
            for hf_name, part in self._policy.conversion.to_hf(name, values).items() if mine else ():
                # a copy, as the file format refuses tensors that share memory
                kept[hf_name] = part.to("cpu", self._published(tensor), copy=True).contiguous()
        if mine:
            self._role.patience.write(path.name, lambda: save_tensors(kept, path))
            path.chmod(0o644)

    def _published(self, tensor: Tensor) -> torch.dtype:
        """Buffers keep their precision: a rounded score correction would route tokens otherwise than in training."""
        return getattr(torch, self._dtype) if isinstance(tensor, nn.Parameter) else tensor.dtype

    def _clean_up(self) -> None:
        """Delete old versions, beyond the newest few and before the oldest that an engine still runs, and leftovers."""
        paths = self._role.paths
        for name in list_fresh(paths.weights):
            if name.startswith(".v"):
                shutil.rmtree(paths.weights / name)
        versions = weights.published_versions(paths.weights)
        acks = [read_json(paths.acks / name) for name in list_fresh(paths.acks)
                if name.endswith(".json") and not name.startswith(".")]  # fmt: skip
        in_use = [PolicyVersion.parse(ack["version"]) for ack in acks if ack]
        for version in versions[: -self._keep]:
            if version < min(in_use, default=versions[-1]):
                path = paths.weights_version(str(version))
                condemned = path.with_name(f".{path.name}.removed")
                path.rename(condemned)
                shutil.rmtree(condemned)


def describe_model(directory: Path, model: ModelConfig, dtype: str) -> None:
    """Put beside weights of `dtype` what else makes a model: config and tokenizer."""
    for source in dict.fromkeys((model.path, model.tokenizer or model.path)):
        for path in Path(source).iterdir():
            if path.suffix in TOKENIZER_SUFFIXES and path.name != INDEX and path.is_file():
                shutil.copyfile(path, directory / path.name)
    config = json.loads((Path(model.path) / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2))


def write_index(
    directory: Path, files: dict[str, list[str]], tensors: dict[str, Tensor], conversion: Conversion
) -> None:
    """Which of several files holds which tensor of the checkpoint's names."""
    weight_map = {piece.name: file for file, names in files.items() for name in names
                  for piece in conversion.pieces(name, tensors[name].shape)}  # fmt: skip
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """`save_file`, whose error hides that of the file system in its text."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]), str(error)) from error if number else error


def divide(sizes: dict[str, int]) -> dict[str, list[str]]:
    """File name -> tensors in order, a new file wherever one would pass `FILE_BYTES`."""
    groups: list[list[str]] = []
    free = -math.inf
    for name, size in sizes.items():
        if size > free:
            groups.append([])
            free = FILE_BYTES
        groups[-1].append(name)
        free -= size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}
