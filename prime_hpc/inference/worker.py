"""The part of an engine that lives in every vLLM worker: checks a version directory and loads it.

vLLM mixes `WeightReceiver` into its worker class. An exception that leaves a method called by `collective_rpc` ends the
whole engine, so each method returns what went wrong instead.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from prime_hpc.inference.receive import Answer, acknowledge, answers_errors, check, check_complete, read_shapes


class WeightReceiver:
    """Extension of a vLLM worker. Names carry the product's, since vLLM's worker has many of its own."""

    @answers_errors
    def prime_hpc_verify(self, directory: str, version: str) -> Answer:
        """Check the files of `directory` against its manifest; nothing of the model is touched."""
        manifest = check(Path(directory), version)
        if self.vllm_config.lora_config is None:
            check_complete(Path(directory), manifest, Path(self.model_config.model))
        self._prime_hpc_manifest = manifest
        return {"digest": manifest.digest}

    @answers_errors
    def prime_hpc_load(self, directory: str, acks: str, process: str) -> Answer:
        """Load the verified `directory` and write this rank's acknowledgement under `acks`."""
        begin = time.monotonic()
        manifest = self._prime_hpc_manifest
        files = [Path(directory) / name for name in sorted(manifest.files)]
        if self.vllm_config.lora_config is None:
            n_tensors = reload_model(self.get_model(), self.vllm_config, files)
        else:
            n_tensors = self._prime_hpc_reload_adapters(files)
        parallel = self.vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + self.rank
        return acknowledge(Path(acks), process, rank, manifest, begin=begin, n_tensors=n_tensors)

    def _prime_hpc_reload_adapters(self, files: list[Path]) -> int:
        """Replace adapters by those in the folders of `files`. Each keeps its number, hence requests that run go on
        with the new one."""
        for number, file in enumerate(files, 1):
            self.remove_lora(number)
            self.add_lora(LoRARequest(file.parent.name, number, lora_path=str(file.parent)))
        return sum(len(read_shapes(file)) for file in files)


def reload_model(model: torch.nn.Module, vllm_config: VllmConfig, files: list[Path]) -> int:
    """Replace all weights of a running model, layer by layer and in place; returns the number of tensors read."""
    read: list[str] = []
    with set_current_vllm_config(vllm_config), torch.no_grad():
        initialize_layerwise_reload(model)
        model.load_weights(_tensors(files, read))
        finalize_layerwise_reload(model, vllm_config.model_config)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return len(read)


def _tensors(files: list[Path], read: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the files by name; the names go to `read`."""
    for path in sorted(files):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                read.append(name)
                yield name, file.get_tensor(name)
