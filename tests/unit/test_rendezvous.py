"""How processes find one another through files: late directories, older attempts, deadlines; and the run's secrets."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from prime_hpc.cluster import secrets
from prime_hpc.cluster.files import appears
from prime_hpc.cluster.rendezvous import Rendezvous
from prime_hpc.errors import DeadlineExceeded
from prime_hpc.inference.receive import check
from prime_hpc.transport import weights
from prime_hpc.transport.messages import PolicyVersion


def later(action: Callable[[], object]) -> None:
    threading.Timer(0.3, action).start()


def test_a_wait_ends_when_the_fact_is_published_in_a_directory_that_was_not_there(tmp_path: Path) -> None:
    directory = tmp_path / "rendezvous"
    later(lambda: Rendezvous(directory, "inference-0", 2).publish("ready", base_url="http://a"))
    assert Rendezvous(directory, "orchestrator-0", 2).wait("inference-0", "base_url", 20) == "http://a"
    assert [path.name for path in directory.iterdir()] == ["inference-0.json"], "written beside and renamed"


def test_what_an_older_attempt_said_is_not_believed_and_the_deadline_names_everybody(tmp_path: Path) -> None:
    Rendezvous(tmp_path, "inference-0", 1).publish("ready", base_url="http://old")
    with pytest.raises(DeadlineExceeded, match="orchestrator-0 waited 0 s for base_url from inference-0; see the log"):
        Rendezvous(tmp_path, "orchestrator-0", 2).wait("inference-0", "base_url", 0.1)


def test_weights_that_show_late_are_waited_for(tmp_path: Path) -> None:
    partial, final = tmp_path / ".v0.3.partial", tmp_path / "weights" / "v0.3"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"tensors")
    weights.seal(partial, PolicyVersion(0, 3), "float32")

    def publish() -> None:
        final.parent.mkdir()
        weights.publish(partial, final)

    later(publish)
    assert check(final, "0.3").version == "0.3"


def test_what_never_shows_is_told(tmp_path: Path) -> None:
    assert not appears(tmp_path / "late" / "step_3", 0.2)


def test_secrets_are_the_user_s_own_and_go_with_the_attempt(tmp_path: Path) -> None:
    made = secrets.create(tmp_path)
    directory = secrets.secrets_dir(tmp_path)
    assert tmp_path not in directory.parents
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    assert directory.stat().st_mode & 0o777 == 0o700
    assert secrets.load(tmp_path) == made
    assert secrets.create(tmp_path).token != made.token
    secrets.remove(tmp_path)
    assert not directory.exists()
