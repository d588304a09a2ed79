"""What a person has changed in a run that works: `live.json` in the run directory, read by the orchestrator."""

from pathlib import Path
from typing import Any

import msgspec

from prime_hpc.cluster.files import write_atomic
from prime_hpc.errors import CorruptData


class Live(msgspec.Struct, kw_only=True, frozen=True):
    """`paused` opens no new group, `why` where it was not a person; `values` by key go before those of the
    configuration."""

    paused: bool = False
    why: str = ""
    values: dict[str, Any] = {}


def read_live(path: Path) -> Live:
    """The changes so far; none where there is no file.

    Raises:
        CorruptData: somebody wrote something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Live) if path.exists() else Live()
    except msgspec.MsgspecError as error:
        raise CorruptData(f"{path} is not what `tune` writes: {error}") from error


def write_live(path: Path, live: Live) -> None:
    write_atomic(path, msgspec.json.format(msgspec.json.encode(live)))
