"""Latent attention over keys that an indexer chooses: by chunks, recomputed, compiled, and what it costs."""

import pytest
import torch

from prime_hpc.models import indexed, indexed_plain, spec
from prime_hpc.models.indexed import IndexedAttention
from prime_hpc.trainer.compilation import compile_block
from prime_hpc.trainer.memory.checkpointing import checkpoint_block
from tests.models_support import DSA, assert_near, load_native, open_row, save_model

SEQ_LENS = [9, 2, 14, 1, 5]
TOP_K = 4


def run(model: torch.nn.Module) -> torch.Tensor:
    positions = torch.cat([torch.arange(n) for n in SEQ_LENS])
    tokens = torch.arange(len(positions)) * 7 % 48
    return model(tokens, positions, open_row(SEQ_LENS, TOP_K))


def choose(heads: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    n = sum(SEQ_LENS)
    query, key, weights = torch.randn(n, heads, 6), torch.randn(n, 6), torch.rand(n, heads)
    return query, key, weights, open_row(SEQ_LENS, TOP_K).choose(query, key, weights)


def test_the_best_keys_of_the_document_so_far_are_chosen():
    query, key, weights, chosen = choose(heads=16)
    scores = (torch.einsum("mhd,nd->mhn", query, key).relu() * weights[..., None]).sum(1)
    begin = 0
    for n in SEQ_LENS:
        for i in range(begin, begin + n):
            best = scores[i, begin : i + 1].topk(min(TOP_K, i + 1 - begin)).indices + begin
            assert sorted(x for x in chosen[i].tolist() if x >= 0) == sorted(best.tolist())
        begin += n


def test_chunks_change_nothing(monkeypatch):
    *inputs, chosen = choose(heads=16)
    row = open_row(SEQ_LENS, TOP_K)
    query, keys = (
        torch.randn(sum(SEQ_LENS), 3, 6, requires_grad=True),
        torch.randn(sum(SEQ_LENS), 6, requires_grad=True),
    )
    results = []
    for size in (2**28, 2000):
        monkeypatch.setattr(indexed, "SCORES_BYTES", size)
        monkeypatch.setattr(indexed_plain, "CHUNK_BYTES", size)
        output = row.over(query, keys, row.choose(*inputs), 4, 0.5)
        results.append((output, *torch.autograd.grad(output.square().sum(), (query, keys))))
    for whole, cut in zip(*results, strict=True):
        assert_near(cut, whole)


def test_the_gradient_is_that_of_the_formula():
    torch.manual_seed(2)
    query, keys = (torch.randn(6, *shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3), (3,)))
    chosen = torch.tensor([[0, -1], [1, 0], [2, 0], [1, 3], [4, 3], [3, 5]], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda q, k: indexed.attend_to_chosen(q, k, chosen, 2, 0.7)[0], (query, keys))


@pytest.mark.parametrize(("mode", "compiled"), [("selective", False), ("full", False), ("none", True), ("full", True)])
def test_blocks_give_the_same_gradients_however_they_run(mode, compiled, tmp_path, monkeypatch):
    """The second layer takes what the first chose, also when it is computed anew."""
    compile_plainly = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **kw: compile_plainly(*args, **kw, backend="aot_eager"))
    save_model("glm_moe_dsa", tmp_path)
    plain, changed = load_native(tmp_path), load_native(tmp_path)
    for block in changed.model.layers:
        checkpoint_block(block, mode)
        if compiled:
            compile_block(block, fullgraph=False)
    for model in (plain, changed):
        run(model).square().mean().backward()
    for (name, expected), actual in zip(plain.named_parameters(), changed.parameters(), strict=True):
        if expected.requires_grad:
            assert_near(actual.grad, expected.grad, name)


def test_only_a_choice_that_is_shared_is_remembered(tmp_path):
    save_model("glm_moe_dsa", tmp_path)
    model, row = load_native(tmp_path), open_row(SEQ_LENS, TOP_K)
    model(torch.arange(sum(SEQ_LENS)), torch.cat([torch.arange(n) for n in SEQ_LENS]), row)
    assert DSA["indexer_types"] == ["full", "shared", "full"] and list(row._kept) == [0]


def test_documents_no_longer_than_the_choice_attend_to_everything():
    assert not IndexedAttention(open_row([4, 3]), [4, 3], TOP_K, torch.arange(7)).sparse
    assert open_row([4, 5], TOP_K).sparse


def test_flops_count_the_pairs_that_are_chosen_and_the_choice():
    latent = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "q_lora_rank": 40,
              "num_attention_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24,
              "v_head_dim": 20, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 16,
              "indexer_types": ["full", "shared", "full"]}  # fmt: skip

    def pairs_cost(n: int) -> float:
        return spec.train_flops(latent, [n]) - n * (spec.train_flops(latent, [1]) - one)

    one = 3 * 2 * 4 * (32 + 20) * 3
    assert pairs_cost(4) == 10 * one
    # of six tokens, the last three see four; all 21 pairs are scored by two indexers
    matrices = 40 * 2 * 16 + 64 * (16 + 2)
    assert pairs_cost(6) == 18 * one + 2 * (21 * 2 * 2 * 16 + 6 * 2 * matrices)
