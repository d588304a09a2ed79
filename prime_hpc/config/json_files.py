"""JSON of model directories, as far as checks need it."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file, or None where there is no file or no object in it."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):  # a ValueError is text that is no JSON, or bytes that are no text
        return None
    return value if isinstance(value, dict) else None
