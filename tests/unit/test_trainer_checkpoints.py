"""Checkpoints as files: complete or absent, verified, resolved by name, and kept by policy."""

from pathlib import Path

import pytest

from prime_hpc.errors import ConfigurationError, CorruptData, SchemaMismatch
from prime_hpc.transport import checkpoints
from prime_hpc.transport.checkpoints import CheckpointManifest


def write(directory: Path, step: int, lineage: int = 0) -> Path:
    partial = checkpoints.partial_path(directory, step)
    partial.mkdir(parents=True)
    (partial / "shard").write_bytes(b"weights of %d" % step)
    manifest = CheckpointManifest(step=step, lineage=lineage, world=1, journal_offset=10 * step, config={"seed": 1},
                                  files={"shard": checkpoints.describe(partial / "shard")})  # fmt: skip
    return checkpoints.publish(partial, manifest)


def test_a_published_checkpoint_verifies_and_holds_what_was_said(tmp_path):
    manifest = checkpoints.verify(write(tmp_path, 3))
    assert (manifest.step, manifest.journal_offset, manifest.config) == (3, 30, {"seed": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["step_3"]


def test_publishing_a_step_again_replaces_it(tmp_path):
    write(tmp_path, 3)
    assert checkpoints.verify(write(tmp_path, 3, lineage=1)).lineage == 1


@pytest.mark.parametrize("damage", [b"weights of 4", b"weights"])
def test_a_damaged_file_is_refused_by_name(damage, tmp_path):
    checkpoint = write(tmp_path, 3)
    (checkpoint / "shard").write_bytes(damage)
    with pytest.raises(CorruptData, match="step_3/shard"):
        checkpoints.verify(checkpoint)


def test_a_missing_file_and_a_torn_manifest_are_refused_by_name(tmp_path):
    checkpoint = write(tmp_path, 3)
    (checkpoint / "shard").unlink()
    with pytest.raises(CorruptData, match="step_3/shard has None bytes"):
        checkpoints.verify(checkpoint)
    (checkpoint / "manifest.json").write_text("{")
    with pytest.raises(CorruptData, match="step_3/manifest.json"):
        checkpoints.verify(checkpoint)


def test_another_schema_is_refused(tmp_path):
    manifest = write(tmp_path, 3) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema": 1', '"schema": 2'))
    with pytest.raises(SchemaMismatch, match="schema 2"):
        checkpoints.verify(manifest.parent)


def test_latest_is_the_newest_complete_one_of_the_newest_lineage(tmp_path):
    assert checkpoints.find_latest(tmp_path) is None
    write(tmp_path, 2)
    write(tmp_path, 10)
    checkpoints.partial_path(tmp_path, 12).mkdir()
    (tmp_path / "step_14").mkdir()
    assert checkpoints.find_latest(tmp_path) == tmp_path / "step_10"
    write(tmp_path, 4, lineage=1)
    assert checkpoints.find_latest(tmp_path) == tmp_path / "step_4"
    assert checkpoints.complete_steps(tmp_path) == [2, 4, 10]


def test_resolve_takes_latest_a_step_or_a_path(tmp_path):
    for step in (2, 4):
        write(tmp_path, step)
    assert checkpoints.resolve(tmp_path, "latest") == tmp_path / "step_4"
    assert checkpoints.resolve(tmp_path, "2") == tmp_path / "step_2"
    assert checkpoints.resolve(tmp_path / "other", str(tmp_path / "step_2")) == tmp_path / "step_2"


@pytest.mark.parametrize("which", ["3", "elsewhere/step_2"])
def test_resolve_names_the_steps_there_are(which, tmp_path):
    write(tmp_path, 2)
    with pytest.raises(ConfigurationError, match=rf"resume = '{which}'.*: 2$"):
        checkpoints.resolve(tmp_path, which)


def test_resolve_of_a_path_that_is_none_speaks_of_that_path(tmp_path):
    with pytest.raises(ConfigurationError, match=r"'nowhere': .* the path of a complete checkpoint; .*: none$"):
        checkpoints.resolve(tmp_path, "nowhere")


def test_prune_keeps_the_newest_and_the_multiples(tmp_path):
    for step in (2, 4, 6, 8, 10):
        write(tmp_path, step)
    assert checkpoints.prune(tmp_path, keep_last=1, keep_every=4) == [2, 6]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_10", "step_4", "step_8"]


def test_partials_are_removed_and_complete_ones_stay(tmp_path):
    write(tmp_path, 2)
    checkpoints.partial_path(tmp_path, 3).mkdir()
    checkpoints.remove_partials(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_2"]
