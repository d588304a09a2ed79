"""The weights of the fake engine: taken as a worker of vLLM takes them, kept on the host, and scored with on demand."""

import time
from pathlib import Path
from typing import Any

from prime_hpc.inference.receive import Answer, acknowledge, check, read_shapes


class FakeWeights:
    """The only worker rank. Torch is imported by the first load that needs it, since an engine must start quickly."""

    def __init__(self, model: Path):
        self._model = model
        self._files: list[Path] = []
        self._tensors: dict[str, Any] = {}
        self._stream: Any = None

    def prime_hpc_verify(self, directory: str, version: str) -> Answer:
        self._manifest = check(Path(directory), version)
        return {"digest": self._manifest.digest}

    def prime_hpc_load(self, directory: str, acks: str, process: str) -> Answer:
        begin, manifest = time.monotonic(), self._manifest
        self._files, self._tensors = [Path(directory) / name for name in manifest.files], {}
        n_tensors = sum(len(read_shapes(path)) for path in self._files)
        return acknowledge(Path(acks), process, 0, manifest.version, manifest.digest, begin=begin, n_tensors=n_tensors)

    def prime_hpc_join(self, directory: str, version: str, process: str, link: str, workers: str) -> Answer:
        import torch

        from prime_hpc.inference.stream import StreamReceiver

        self._stream = self._stream or StreamReceiver(process, 0, int(workers), torch.device("cpu"))
        self._stream.join(Path(directory), link)
        return {}

    def prime_hpc_receive(self, version: str, acks: str, process: str) -> Answer:
        begin = time.monotonic()
        self._files, self._tensors = [], {name: tensor.clone() for name, tensor in self._stream.receive(version)}
        return acknowledge(Path(acks), process, 0, version, self._stream.digest, begin=begin,
                           n_tensors=len(self._tensors))  # fmt: skip

    def prime_hpc_checksums(self) -> Answer:
        from prime_hpc.inference.parameters import checksum

        return {"checksums": {name: checksum(tensor) for name, tensor in sorted(self._loaded().items())}}

    def score(self, token_ids: list[int]) -> list[float]:
        """By a model of transformers that holds the tensors."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self._model))
        model.load_state_dict(self._loaded(), strict=False)
        ids = torch.tensor([token_ids])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()

    def spoil(self) -> None:
        """What a wrong loader would do to one tensor."""
        self._tensors = {name: tensor.clone() for name, tensor in self._loaded().items()}
        name = next(name for name in sorted(self._tensors) if name.endswith("up_proj.weight"))
        self._tensors[name].mul_(-3)

    def _loaded(self) -> dict[str, Any]:
        from safetensors.torch import load_file

        if not self._tensors:
            self._tensors = {name: tensor for path in self._files for name, tensor in load_file(path).items()}
        return self._tensors
