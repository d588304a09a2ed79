"""A supervisor that is no longer the newest leaves at once and touches nothing."""

import json
import subprocess
import sys
import time
from pathlib import Path

from prime_hpc.cluster.files import write_json
from prime_hpc.cluster.lease import EXIT_FENCED

KEEP = """
import sys, time
from pathlib import Path
from prime_hpc.cluster.lease import LeaseKeeper
LeaseKeeper(Path(sys.argv[1]), 1, 0.6)
print("held", flush=True)
time.sleep(60)
"""


def test_a_supervisor_leaves_when_a_newer_attempt_holds_the_lease(tmp_path: Path) -> None:
    keeper = subprocess.Popen([sys.executable, "-c", KEEP, str(tmp_path)], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True)  # fmt: skip
    assert keeper.stdout is not None and keeper.stdout.readline() == "held\n"
    newer = {"attempt": 2, "beat": 0.0}
    deadline = time.monotonic() + 240
    while keeper.poll() is None and time.monotonic() < deadline:  # a renewal that had already looked may overwrite it
        write_json(tmp_path / "lease.json", newer)
        time.sleep(0.2)
    _, errors = keeper.communicate(timeout=240)
    assert keeper.returncode == EXIT_FENCED
    assert errors == "leaving: attempt 2 has taken over\n"
    assert json.loads((tmp_path / "lease.json").read_text()) == newer
