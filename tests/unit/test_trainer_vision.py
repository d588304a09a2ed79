"""A policy that sees, against transformers run document by document in float32."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3VLForConditionalGeneration

from prime_hpc.algorithms.losses import MicroBatchTensors
from prime_hpc.algorithms.packing import pack
from prime_hpc.config.run import RunConfig
from prime_hpc.errors import ConfigurationError, CorruptData
from prime_hpc.models.degrees import Degrees
from prime_hpc.trainer.distributed import World
from prime_hpc.trainer.hf_weights import load_weights
from prime_hpc.trainer.model import build_policy
from prime_hpc.trainer.parallel.mesh import Mesh
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.trainer.probe import sample_replies
from prime_hpc.trainer.row import PackedRow
from prime_hpc.trainer.vision import ImageReader
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import Sample
from tests.models_support import greedy
from tests.vision_support import TOKEN, make_png, make_sample

UNUSED = 60
"""A token that stands for no character."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, torch.device("cpu"), Mesh.of("cpu", Degrees()), dist.group.WORLD)
    dist.destroy_process_group()


def load_policy(path: Path, world: World, *, freeze: bool = True, attn: str = "auto") -> PolicyModel:
    config = RunConfig()
    config.model.path, config.model.freeze_vision, config.trainer.attn = str(path), freeze, attn
    policy = build_policy(config, world)
    load_weights(policy, path)
    return policy


def documents() -> tuple[list[Sample], dict[str, bytes]]:
    """Text, one image, two images of other shapes, and text again."""
    made = [
        make_sample("text", 5),
        make_sample("one", 2, (6, make_png(3, 2)), 3),
        make_sample("two", (2, make_png(2, 1, seed=1)), 1, (6, make_png(2, 3, seed=2)), 2),
        make_sample("more text", 9, 1),
    ]
    return [sample for sample, _ in made], {k: v for _, images in made for k, v in images.items()}


def make_row(samples: list[Sample], images: dict[str, bytes]) -> PackedRow:
    [[micro]] = pack(samples, 1, 128)
    return PackedRow.of(micro, MicroBatchTensors.of(micro, torch.device("cpu")), images)


def reference(hf: Qwen3VLForConditionalGeneration, row: PackedRow) -> torch.Tensor:
    """Log-probability of every token but the first of each document, run by itself as transformers would."""
    logprobs, start = [], 0
    for document in row.token_ids.split(row.seq_lens):
        shown = [(span, data) for span, data in row.images if start <= span.start < start + len(document)]
        seeing = {}
        if shown:
            alone = PackedRow(document, document, document, document, [len(document)], images=shown)
            pixels = ImageReader(Path(hf.name_or_path), hf.config.vision_config).read(alone)
            types = (document == TOKEN["<|image_pad|>"]).int()[None]
            seeing = {"pixel_values": pixels.values, "image_grid_thw": pixels.grids, "mm_token_type_ids": types}
        scores = hf(input_ids=document[None], **seeing).logits[0, :-1].log_softmax(-1)
        logprobs.append(scores.gather(-1, document[1:, None])[:, 0])
        start += len(document)
    return torch.cat(logprobs)


def scored(policy: PolicyModel, row: PackedRow) -> torch.Tensor:
    """What the policy gives all tokens but the first of each document."""
    inner = row.position_ids.nonzero()[:, 0]
    return policy(PackedRow(row.token_ids, row.position_ids, row.temperatures, inner, row.seq_lens,
                            images=row.images))[0][inner]  # fmt: skip


@pytest.mark.parametrize(("attn", "freeze"), [("sdpa", True), ("sdpa", False), ("eager", True)])
def test_packed_documents_with_images_score_as_they_do_one_by_one(attn, freeze, tiny_vision_model, world):
    hf = Qwen3VLForConditionalGeneration.from_pretrained(tiny_vision_model, dtype=torch.float32).eval()
    policy, row = load_policy(tiny_vision_model, world, freeze=freeze, attn=attn), make_row(*documents())
    assert len(row.images) == 3 and len(row.seq_lens) == 4
    expected, logprobs = reference(hf, row), scored(policy, row)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(len(expected), generator=torch.Generator().manual_seed(0))
    (logprobs * upstream).sum().backward()
    (expected * upstream).sum().backward()
    gradients = {name: parameter.grad for name, parameter in hf.named_parameters()}
    assert [name for name, _ in policy.named_parameters()] == list(gradients)
    for name, parameter in policy.named_parameters():
        if freeze and ".visual." in name:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name], rtol=1e-5, atol=1e-5)


def test_a_sampled_placeholder_is_a_token_like_others(tmp_path, tiny_vision_model, world):
    """Beside it a token that nothing stands for, with the same rows of embedding and head."""
    placeholder = TOKEN["<|image_pad|>"]
    hf = Qwen3VLForConditionalGeneration.from_pretrained(tiny_vision_model, dtype=torch.float32)
    for matrix in (hf.model.language_model.embed_tokens.weight, hf.lm_head.weight):
        matrix.data[UNUSED] = matrix.data[placeholder]
    hf.save_pretrained(tmp_path)
    shutil.copy(tiny_vision_model / "preprocessor_config.json", tmp_path)
    sample, images = make_sample("one", 2, (6, make_png(3, 2)), 3, reply=5)
    policy, scores = load_policy(tmp_path, world), []
    for token in (placeholder, UNUSED):
        tokens = sample.token_ids.numpy().copy()
        tokens[-4:-2] = token
        changed = msgspec.structs.replace(sample, token_ids=Array.of(tokens, "i4"))
        scores.append(scored(policy, make_row([changed], images)))
    assert torch.equal(*scores)


def test_rows_with_images_do_not_fit_a_model_that_does_not_see(tiny_model, world):
    row = make_row(*documents())
    with pytest.raises(ConfigurationError, match="model.path = 'qwen3': expected a model that sees"):
        load_policy(tiny_model, world)(row)


def test_an_image_that_takes_other_tokens_than_it_had_is_refused(tiny_vision_model, world):
    sample, images = make_sample("one", 2, (5, make_png(3, 2)))
    with pytest.raises(CorruptData, match="takes 6 tokens by the processor in .* and had 5"):
        load_policy(tiny_vision_model, world)(make_row([sample], images))


def test_replies_are_sampled_without_images(tiny_vision_model, world):
    policy, prompts = load_policy(tiny_vision_model, world), [np.array([1, 14, 15]), np.array([1, 16, 17, 18])]
    hf = Qwen3VLForConditionalGeneration.from_pretrained(tiny_vision_model, dtype=torch.float32).eval()
    replies = sample_replies(policy, prompts, 4, 0.0, UNUSED, torch.Generator())
    assert replies == [greedy(hf, prompt.tolist(), 4) for prompt in prompts]
