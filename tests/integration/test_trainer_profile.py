"""Profiles of the trainer's steps."""

import gzip
import json
from pathlib import Path

import torch

from prime_hpc.config.checks import find_conflicts
from prime_hpc.config.compose import compose_run
from tests.integration.runs import RunDirectory
from tests.integration.test_trainer_bench import SMALL, launch
from tests.trainer_support import make_run


def read_trace(path: Path) -> list[dict]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_the_trace_of_chosen_steps_names_phases_and_operations(tmp_path: Path, tiny_model: Path) -> None:
    profile = {"start": 2, "steps": 2, "memory": True}
    run = make_run(tmp_path / "run", tiny_model, max_steps=4, trainer={"profile": profile}).record(4).train()
    (path,) = (tmp_path / "run" / "profile").rglob("*.*")
    assert path.relative_to(tmp_path / "run") == Path("profile/steps_2-3/trainer-0.trace.json.gz")
    events = read_trace(path)
    count = {name: sum(event.get("name") == name for event in events) for name in ("forward_backward", "optimizer")}
    assert count == {"forward_backward": 2, "optimizer": 2}
    assert {"aten::mm", "wait_for_batch", "publish", "[memory]"} <= {event.get("name") for event in events}

    plain = make_run(tmp_path / "plain", tiny_model, max_steps=4).record(4).train()
    assert not plain.paths.profile.exists()
    for name, tensor in plain.weights("0.4").items():
        assert torch.equal(run.weights("0.4")[name], tensor), name


def test_every_rank_of_the_bench_writes_its_own_even_where_steps_run_out(tmp_path: Path) -> None:
    code, said = launch(tmp_path, "trainer.ranks=2", "max_steps=4", "seq_len=16", "trainer.micro_batch_tokens=32",
                        "trainer.profile.steps=9", "trainer.profile.start=4", "trainer.profile.ranks=null",
                        *(f"model.shape.{item}" for item in SMALL))  # fmt: skip
    assert code == 0, said
    folder = RunDirectory(tmp_path / "bench").root / "profile" / "steps_4-4"
    assert sorted(path.name for path in folder.iterdir()) == [f"trainer-{i}.trace.json.gz" for i in (0, 1)]


def test_steps_and_ranks_that_a_run_does_not_have_are_refused() -> None:
    def problems(*arguments: str) -> dict[str, str]:
        config = compose_run(["+experiment=reverse_text_cpu", "max_steps=4", "trainer.profile.steps=1", *arguments])
        return {p.key: p.expected for p in find_conflicts(config) if p.key.startswith("trainer.profile")}

    assert problems("trainer.profile.ranks=[0,2]", "trainer.ranks=2", "trainer.profile.start=5") == {
        "trainer.profile.start": "at most max_steps = 4",
        "trainer.profile.ranks": "null for all, or some of 0 to 1",
    }
    assert problems("mode=sample") == {"trainer.profile.steps": "0, since mode=sample has no trainer"}
    assert problems("trainer.profile.ranks=null") == {}
