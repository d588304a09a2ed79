"""Lines of a process's log: text, or a JSON object each, which our own commands read as the same text."""

import json
import logging
import sys

from prime_hpc.config.sections import MonitorConfig

TEXT, CLOCK = "%(asctime)s %(levelname)-7s %(name)s %(message)s", "%H:%M:%S"
DATE = "%Y-%m-%dT%H:%M:%S%z"
BEGIN = '{"time": "'
"""Of every line of ours in JSON."""


class JsonFormatter(logging.Formatter):
    """One object a record: `time` (ISO 8601), `level`, `process`, `logger`, `message` and, of an error, `traceback`."""

    def __init__(self, process: str):
        super().__init__(datefmt=DATE)
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": self.formatTime(record, DATE), "level": record.levelname, "process": self._process,
                "logger": record.name, "message": record.getMessage()}  # fmt: skip
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up(monitor: MonitorConfig, process: str) -> None:
    """Log to stderr, from the level on and in the format that is wanted."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if monitor.log_format == "json" else logging.Formatter(TEXT, CLOCK))
    logging.basicConfig(level=monitor.log_level.upper(), handlers=[handler])


def to_text(line: str) -> str:
    """A line as `log_format=text` would have it; any other line as it is."""
    if not line.startswith(BEGIN):
        return line
    try:
        given = json.loads(line)
        text = f"{given['time'][11:19]} {given['level']:<7} {given['logger']} {given['message']}"
        return "\n".join(filter(None, [text, given.get("traceback")]))
    except (ValueError, KeyError):  # cut, or another program's
        return line
