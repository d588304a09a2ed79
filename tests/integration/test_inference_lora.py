"""A real vLLM engine that serves two adapters of a tiny model beside it, and takes new ones while requests run."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from prime_hpc.config.inference import InferenceConfig
from prime_hpc.config.lora import LoRAConfig
from prime_hpc.config.run import RunConfig
from prime_hpc.config.sections import ModelConfig
from prime_hpc.models.tiny import make_tiny_model
from prime_hpc.trainer.lora import make_peft_folder
from prime_hpc.transport.messages import PolicyVersion
from prime_hpc.transport.weights import seal
from tests.fake_engine.process import EngineProcess

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

LORA = LoRAConfig(rank=4, alpha=8.0, adapters=["a", "b"])
PROMPT = [1, 9, 4, 17, 22, 2]
TOLERANCE = 1e-5


def make_adapter(model: torch.nn.Module, folder: Path, seed: int) -> torch.nn.Module:
    """Write a random adapter of `model` to `folder` and return a copy of the model with it merged."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    merged = type(model)(model.config)
    merged.load_state_dict(model.state_dict())
    for name, module in merged.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            outputs, inputs = module.weight.shape
            a, b = (0.2 * torch.randn(shape, generator=generator) for shape in ((4, inputs), (outputs, 4)))
            module.weight.data += 2.0 * b @ a
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    save_file(tensors, make_peft_folder(folder, LORA, "base"))
    return merged.eval()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineProcess, Path, dict]]:
    """The engine, the folder of versions 0.1 and 0.2, and merged models by version and adapter."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("adapters")
    base = make_tiny_model(root / "base", seed=0)
    models = {}
    for step in (1, 2):
        for i, adapter in enumerate("ab"):
            models[f"0.{step}", adapter] = make_adapter(base, root / f"v0.{step}" / adapter, seed=2 * step + i)
        seal(root / f"v0.{step}", PolicyVersion(0, step), "float32")
    config = RunConfig(seq_len=256, model=ModelConfig(path=str(root / "base")), lora=LORA,
                       inference=InferenceConfig(start_timeout_s=300))  # fmt: skip
    models["0.0", "policy"] = base.eval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIME_HPC_HOME", str(tmp_path_factory.mktemp("home")))
        with EngineProcess(tmp_path_factory.mktemp("vllm") / "run", config) as engine:
            engine.wait_ready()
            yield engine, root, models


def sample(engine: EngineProcess, model: str) -> dict:
    sampling = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}
    body = {"model": model, "token_ids": PROMPT, "sampling_params": sampling}
    reply = engine.post("/inference/v1/generate", body, **{"X-Session-ID": "s"})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


def error(model: torch.nn.Module, choice: dict) -> float:
    """Greatest difference of the engine's log-probabilities from the model's."""
    tokens = torch.tensor([*PROMPT, *choice["token_ids"]])
    with torch.no_grad():
        scores = model(tokens[None]).logits[0].log_softmax(-1)[len(PROMPT) - 1 : -1]
    expected = scores.gather(-1, torch.tensor(choice["token_ids"])[:, None])[:, 0]
    return (torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]]) - expected).abs().max().item()


def test_each_adapter_of_each_version_samples_as_if_merged(served: tuple[EngineProcess, Path, dict]) -> None:
    engine, root, models = served
    for version in ("0.1", "0.2", "0.1"):
        reply = engine.post("/prime_hpc/load", {"version": version, "path": str(root / f"v{version}")})
        assert reply.status_code == 200, reply.text
        assert [ack["n_tensors"] for ack in reply.json()["workers"]] == [2 * 2 * 7 * 4]
        for adapter in "ab":
            choice = sample(engine, adapter)
            others = [model for key, model in models.items() if key != (version, adapter)]
            assert error(models[version, adapter], choice) < TOLERANCE
            assert min(error(other, choice) for other in others) > 1e-2
    assert error(models["0.0", "policy"], sample(engine, "policy")) < TOLERANCE


def test_unknown_models_are_refused_with_the_names_there_are(served: tuple[EngineProcess, Path, dict]) -> None:
    reply = served[0].post("/inference/v1/generate", {"model": "c", "token_ids": PROMPT, "sampling_params": {}})
    assert reply.status_code == 400
    assert "expected one of 'policy', 'a', 'b'" in reply.json()["error"]
