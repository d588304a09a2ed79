"""The part of an engine that lives in every vLLM worker: checks a version directory and loads it.

vLLM mixes `WeightReceiver` into its worker class. An exception that leaves a method called by `collective_rpc` ends the
whole engine, so each method returns what went wrong instead.
"""

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from prime_hpc.cluster.files import write_atomic
from prime_hpc.errors import CorruptData, InferenceFailure
from prime_hpc.inference.protocol import WorkerAck
from prime_hpc.transport.weights import WeightsManifest, verify

Answer = dict[str, Any]


def answers_errors(method: Callable[..., Answer]) -> Callable[..., Answer]:
    """Turn an exception into `{"error": text, "type": class name}`."""

    @functools.wraps(method)
    def guarded(*args: Any) -> Answer:
        try:
            return method(*args)
        except Exception as error:
            return {"error": str(error) or repr(error), "type": type(error).__name__}

    return guarded


class WeightReceiver:
    """Extension of a vLLM worker. Names carry the product's, since vLLM's worker has many of its own."""

    @answers_errors
    def prime_hpc_verify(self, directory: str, version: str) -> Answer:
        """Check the files of `directory` against its manifest; nothing of the model is touched."""
        self._prime_hpc_manifest = manifest = verify(Path(directory))
        if manifest.version != version:
            raise CorruptData(f"{directory} holds version {manifest.version}, not {version}")
        return {"digest": manifest.digest}

    @answers_errors
    def prime_hpc_load(self, directory: str, acks: str, process: str) -> Answer:
        """Load the verified `directory` and write this rank's acknowledgement under `acks`."""
        begin = time.monotonic()
        manifest: WeightsManifest = self._prime_hpc_manifest
        n_tensors = reload_model(self.get_model(), self.vllm_config, Path(directory), list(manifest.files))
        ack = WorkerAck(version=manifest.version, digest=manifest.digest, seconds=time.monotonic() - begin,
                        n_tensors=n_tensors, time=time.time())  # fmt: skip
        parallel = self.vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + self.rank
        write_atomic(Path(acks) / f"{process}.rank{rank}.json", msgspec.json.encode(ack), durable=False)
        return msgspec.to_builtins(ack)


def reload_model(model: torch.nn.Module, vllm_config: Any, directory: Path, files: list[str]) -> int:
    """Replace all weights of a running model, layer by layer and in place; returns the number of tensors read.

    Raises:
        InferenceFailure: the files lack weights of the model, which now holds a mixture of two versions.
    """
    count = 0

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal count
        for item in _tensors(directory, files):
            count += 1
            yield item

    with set_current_vllm_config(vllm_config), torch.no_grad():
        initialize_layerwise_reload(model)
        expected = {name for name, _ in model.named_parameters()}
        loaded = model.load_weights(counted())
        finalize_layerwise_reload(model, vllm_config.model_config)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    missing = sorted(expected - loaded) if loaded is not None and vllm_config.quant_config is None else []
    if missing:
        raise InferenceFailure(f"{directory} has no weights for {', '.join(missing[:5])} and {len(missing)} in all")
    return count


def _tensors(directory: Path, files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in sorted(files):
        with safe_open(directory / name, framework="pt") as file:
            for key in file.keys():
                yield key, file.get_tensor(key)
