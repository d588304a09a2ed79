"""The tool that compares layouts: each of them is one that a run of so many ranks may have."""

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from transformers import AutoConfig

from prime_hpc.models.degrees import choose_degrees
from tools import check_parallel


@pytest.mark.parametrize("ranks", [2, 8])
def test_every_layout_is_legal(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check_parallel, "find_spec", lambda name: ModuleSpec(name, None))
    found = check_parallel.layouts(ranks, [])
    assert "ep deepep" in [layout.name for layout in found]
    for layout in found:
        sparse = check_parallel.SMALL_SPARSE if layout.model_type == "qwen3_moe" else {}
        AutoConfig.for_model(layout.model_type, **check_parallel.SMALL, **sparse).save_pretrained(tmp_path)
        degrees = choose_degrees(check_parallel.make_config(tmp_path, layout, "float32", ranks), ranks)
        divided = {name: value for name, value in (layout.degrees or {}).items() if isinstance(value, int)}
        assert {name: getattr(degrees, name) for name in divided} == divided
