"""A real Slurm for the tests marked `slurm`."""

from collections.abc import Iterator

import pytest

from tools.slurm_sandbox import SlurmSandbox
from tools.slurm_sandbox.packages import how_to_install, missing_programs


@pytest.fixture(scope="session")
def slurm_sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmSandbox]:
    """Five nodes of four processors, two GPUs on all but `node0`, with accounting. Tests share it: each leaves every
    node alive, and `slurm` ends its jobs."""
    if missing := missing_programs():
        pytest.skip(f"{', '.join(missing)} not installed; run {how_to_install()}")
    with SlurmSandbox(tmp_path_factory.mktemp("slurm"), accounting=True) as sandbox:
        yield sandbox


@pytest.fixture
def slurm(slurm_sandbox: SlurmSandbox) -> Iterator[SlurmSandbox]:
    """The session's sandbox, whose jobs end with the test."""
    before = slurm_sandbox.jobs()
    yield slurm_sandbox
    slurm_sandbox.cancel(slurm_sandbox.jobs() - before)
