"""Motley's own log lines: where they go, and as what."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from motley.replicas.host import process_logging
from motley.replicas.host.process_logging import log_to_file, log_to_stderr

LOG = logging.getLogger("motley.replicas.anything")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without what other tests have done with the logger."""
    log = logging.getLogger("motley")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(process_logging.sys, "__stderr__", None)
    level = log.level
    yield
    for handler in log.handlers:
        handler.close()
    log.setLevel(level)


@pytest.fixture
def stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with (tmp_path / "stderr").open("w", buffering=1) as opened:
        monkeypatch.setattr(process_logging.sys, "__stderr__", opened)
        yield tmp_path / "stderr"


def test_a_file_has_all_lines_and_stderr_the_warnings(stderr: Path, tmp_path: Path) -> None:
    log_to_stderr()
    for _ in range(2):  # asked for again it is still one
        log_to_file(tmp_path / "log")
    LOG.info("ready after %d s", 3)
    LOG.warning("slow")
    assert [line.split(" ", 2)[2] for line in (tmp_path / "log").read_text().splitlines()] == [
        "INFO motley.replicas.anything: ready after 3 s",
        "WARNING motley.replicas.anything: slow",
    ]
    assert [line.split(" ", 2)[2] for line in stderr.read_text().splitlines()] == [
        "WARNING motley.replicas.anything: slow"
    ]


def test_each_line_is_an_object_where_json_is_asked_for(
    stderr: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTLEY_LOG_FORMAT", "json")
    log_to_stderr()
    log_to_file(tmp_path / "log")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        LOG.exception("a step failed: \u2028%s", "\n")
    for path in (stderr, tmp_path / "log"):
        [line] = path.read_text().splitlines()
        found = json.loads(line)
        assert found.pop("time").endswith("+00:00")
        assert found.pop("error").endswith("ValueError: two\nlines")
        assert found == {
            "level": "ERROR",
            "logger": "motley.replicas.anything",
            "process": os.getpid(),
            "message": "a step failed: \u2028\n",
        }
