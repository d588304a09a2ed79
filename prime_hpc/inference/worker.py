"""The part of an engine that lives in every vLLM worker: takes a version from files or from the trainer and loads it.

vLLM mixes `WeightReceiver` into its worker class. An exception that leaves a method called by `collective_rpc` ends the
whole engine, so each method returns what went wrong instead.
"""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from prime_hpc.inference import parameters
from prime_hpc.inference.receive import (
    Answer,
    acknowledge,
    answers_errors,
    check,
    check_complete,
    read_shapes,
    shapes_in,
    streamed_shapes,
)
from prime_hpc.inference.stream import StreamReceiver


class WeightReceiver:
    """Extension of a vLLM worker. Names carry the product's, since vLLM's worker has many of its own."""

    _prime_hpc_stream: StreamReceiver | None = None

    @answers_errors
    def prime_hpc_verify(self, directory: str, version: str) -> Answer:
        """Check the files of `directory` against its manifest; nothing of the model is touched."""
        manifest = check(Path(directory), version)
        if self.vllm_config.lora_config is None:
            check_complete(shapes_in(Path(directory), manifest), Path(self.model_config.model), Path(directory))
        self._prime_hpc_manifest = manifest
        return {"digest": manifest.digest}

    @answers_errors
    def prime_hpc_load(self, directory: str, acks: str, process: str) -> Answer:
        """Load the verified `directory` and write this rank's acknowledgement under `acks`."""
        begin, manifest = time.monotonic(), self._prime_hpc_manifest
        files = [Path(directory) / name for name in sorted(manifest.files)]
        if self.vllm_config.lora_config is None:
            reload_model(self.get_model(), self.vllm_config, _tensors(files))
        else:
            self._prime_hpc_reload_adapters(files)
        n_tensors = sum(len(read_shapes(file)) for file in files)
        return acknowledge(Path(acks), process, self._prime_hpc_rank, manifest.version, manifest.digest, begin=begin,
                           n_tensors=n_tensors)  # fmt: skip

    @answers_errors
    def prime_hpc_join(self, directory: str, version: str, process: str, link: str, workers: str) -> Answer:
        """Connect with the trainer rank that offers `version`; nothing of the model is touched.

        `workers` counts the engine's ranks: of data-parallel ones vLLM tells a worker of a dense model nothing.
        """
        if self._prime_hpc_stream is None:
            self._prime_hpc_stream = StreamReceiver(process, self._prime_hpc_rank, int(workers), self.device)
        stream = self._prime_hpc_stream.join(Path(directory), link)
        check_complete(streamed_shapes(stream), Path(self.model_config.model), Path(directory))
        return {}

    @answers_errors
    def prime_hpc_receive(self, version: str, acks: str, process: str) -> Answer:
        """Load `version` as it comes from the trainer and write this rank's acknowledgement under `acks`."""
        begin, stream = time.monotonic(), self._prime_hpc_stream
        reload_model(self.get_model(), self.vllm_config, stream.receive(version))
        return acknowledge(Path(acks), process, self._prime_hpc_rank, version, stream.digest, begin=begin,
                           n_tensors=len(stream.names))  # fmt: skip

    @answers_errors
    def prime_hpc_checksums(self) -> Answer:
        """Checksums of the parameters as they lie in this rank's memory."""
        return {"checksums": parameters.checksums(self.get_model())}

    @property
    def _prime_hpc_rank(self) -> int:
        """This worker among all of the engine's, data-parallel ones included."""
        parallel = self.vllm_config.parallel_config
        return parallel.data_parallel_index * parallel.world_size + self.rank

    def _prime_hpc_reload_adapters(self, files: list[Path]) -> None:
        """Replace adapters by those in the folders of `files`. Each keeps its number, hence requests that run go on
        with the new one."""
        for number, file in enumerate(files, 1):
            self.remove_lora(number)
            self.add_lora(LoRARequest(file.parent.name, number, lora_path=str(file.parent)))


def reload_model(model: torch.nn.Module, vllm_config: VllmConfig, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Replace all weights of a running model, layer by layer and in place.

    Where the tensors end early the model is left usable for another reload, and for nothing else.
    """
    with set_current_vllm_config(vllm_config), torch.no_grad():
        _pack_experts_anew(model)
        initialize_layerwise_reload(model)
        try:
            model.load_weights(tensors)
        finally:
            finalize_layerwise_reload(model, vllm_config.model_config)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _pack_experts_anew(model: torch.nn.Module) -> None:
    """On a CPU experts lie in memory as their kernel packs them, and vLLM packs them only where it makes the kernel."""
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the files by name."""
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)
