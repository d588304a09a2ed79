"""Native models against transformers in float32: logits, log-probabilities and every gradient; weights bit by bit."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from prime_hpc.errors import CorruptData
from prime_hpc.models.attention import Attend
from prime_hpc.models.recurrence import TorchRecurrence
from prime_hpc.trainer.hf_weights import load_weights, named_weights
from tests.models_support import (
    CONFIGS,
    FAMILY_NAMES,
    assert_near,
    checkpoint_gradients,
    load_native,
    open_row,
    save_model,
)

SEQ_LENS = [6, 1, 11, 6, 4]


def make_row(seq_lens: list[int], top_k: int | None) -> tuple[torch.Tensor, torch.Tensor, Attend, TorchRecurrence]:
    torch.manual_seed(4)
    positions = torch.cat([torch.arange(n) for n in seq_lens])
    recurrence = TorchRecurrence(seq_lens, torch.device("cpu"))
    return torch.randint(0, 48, (sum(seq_lens),)), positions, open_row(seq_lens, top_k), recurrence


@pytest.mark.parametrize("seq_lens", [[9], SEQ_LENS], ids=["one document", "packed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_logprobs_and_gradients_equal_those_of_transformers(name, seq_lens, tmp_path):
    hf = save_model(name, tmp_path)
    native = load_native(tmp_path)
    tokens, positions, attend, recurrence = make_row(seq_lens, getattr(hf.config, "index_topk", None))
    logits = native(tokens, positions, attend, recurrence=recurrence)
    expected = torch.cat([hf(input_ids=document[None]).logits[0] for document in tokens.split(seq_lens)])
    assert_near(logits, expected)
    logprobs, expected_logprobs = (x.log_softmax(-1).gather(-1, tokens.roll(-1)[:, None]) for x in (logits, expected))
    assert_near(logprobs, expected_logprobs)
    upstream = torch.randn_like(logprobs)
    (logprobs * upstream).sum().backward()
    (expected_logprobs * upstream).sum().backward()
    gradients = {}
    for parameter, tensor in native.named_parameters():
        if tensor.requires_grad:
            gradients |= native.conversion.to_hf(parameter, tensor.grad)
    wanted = checkpoint_gradients(hf)
    assert gradients.keys() == wanted.keys()
    for parameter, gradient in gradients.items():
        assert_near(gradient, wanted[parameter], parameter)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_weights_come_back_bit_by_bit_under_their_names(name, tmp_path):
    save_model(name, tmp_path)
    stored, native, back = load_file(tmp_path / "model.safetensors"), load_native(tmp_path), {}
    for native_name, tensor in named_weights(native):
        back |= native.conversion.to_hf(native_name, tensor.detach())
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[key], stored[key]) for key in stored)


def test_a_missing_expert_is_refused_by_its_name_in_the_checkpoint(tmp_path):
    save_model("qwen3_moe", tmp_path)
    model = load_native(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CorruptData, match=r"holds no tensor model\.layers\.2\.mlp\.experts\.5\.up_proj\.weight"):
        load_weights(model, tmp_path)
