"""Logs of processes: level and format, and that our commands read both formats alike."""

import json
import logging
from datetime import datetime
from pathlib import Path

import pytest

from prime_hpc.cluster import log_lines
from prime_hpc.config.sections import MonitorConfig
from prime_hpc.observe.logs import LogFile


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What a process writes that logs as told."""

    def say(**options: str) -> str:
        monkeypatch.setattr(logging.root, "handlers", [])
        monkeypatch.setattr(logging.root, "level", logging.WARNING)
        log_lines.set_up(MonitorConfig(**options), "env-words-0")
        log = logging.getLogger("verifiers.v1")
        log.info("loads %r", 'a "word"')
        try:
            raise KeyError("answer")
        except KeyError:
            log.exception("rollout %s", "g-0")
        return capsys.readouterr().err

    return say


def test_a_line_of_json_is_an_object(said) -> None:
    info, error = map(json.loads, said(log_format="json").splitlines())
    assert datetime.fromisoformat(info.pop("time")).tzinfo is not None
    assert info == {"level": "INFO", "process": "env-words-0", "logger": "verifiers.v1",
                    "message": "loads 'a \"word\"'"}  # fmt: skip
    assert error["message"] == "rollout g-0" and error["traceback"].endswith("KeyError: 'answer'")


def test_both_formats_are_read_alike(said, tmp_path: Path) -> None:
    logs = {}
    for form in ("text", "json"):
        path = tmp_path / f"{form}.log"
        path.write_text('torn\n{"time": "torn\n' + said(log_format=form) + "Traceback of a library\n")
        lines = LogFile(path, "env-words-0", 0).lines()
        logs[form] = "\n".join(line.text for line in lines).splitlines()
        assert lines[2].time is not None and abs(lines[2].time - path.stat().st_mtime) < 60
        logs[form][2:4] = [line[8:] for line in logs[form][2:4]]  # without the clock
    assert logs["json"][2:4] == [" INFO    verifiers.v1 loads 'a \"word\"'", " ERROR   verifiers.v1 rollout g-0"]
    assert logs["json"] == logs["text"]


def test_a_level_keeps_what_is_below_it_out(said) -> None:
    assert "loads" in said()
    assert "loads" not in said(log_level="warning")
