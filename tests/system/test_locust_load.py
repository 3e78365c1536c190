"""Locust's users of each protocol against a real service, from several processes at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serve_process import Served

pytestmark = pytest.mark.thorough

FILE = Path(__file__).resolve().parents[2] / "loadtests" / "locustfile.py"
TOKENS = 8


def locust(service: Served, *arguments: str, status: int = 0) -> list[dict[str, Any]]:
    """Return the rows of Locust's tables at the end of a run."""
    command = [sys.executable, "-m", "locust", "-f", str(FILE), "--headless", "--json", "--host", service.http]
    command += ["--grpc-host", service.grpc, "--prompt-tokens", "12", "--output-tokens", str(TOKENS), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ})
    assert run.returncode == status, run.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads(run.stdout)
    return rows


@pytest.mark.parametrize(
    ("user", "protocol"), [("GrpcUser", "motley.v1"), ("OpenAIUser", "openai"), ("KServeUser", "kserve")]
)
def test_each_protocol_fills_every_series(service: Served, user: str, protocol: str) -> None:
    rows = {row["method"]: row for row in locust(service, user, "-u", "4", "-r", "4", "-t", "8s")}
    assert {row["name"] for row in rows.values()} == {protocol}
    whole = rows["end to end"]
    assert whole["num_requests"] > 0
    assert whole["num_failures"] == 0
    for kind in ("first token", "tokens", "goodput"):
        assert rows[kind]["num_requests"] == whole["num_requests"]
    assert 0 < rows["between tokens"]["num_requests"] <= whole["num_requests"] * (TOKENS - 1)
    assert rows["tokens"]["max_response_time"] <= TOKENS
    if protocol != "kserve":  # its events do not say how many tokens they carry
        assert rows["tokens"]["total_response_time"] == whole["num_requests"] * TOKENS


def test_workers_and_shapes_and_what_misses_objectives(service: Served) -> None:
    """Three protocols, two processes that load beside the one that gathers, and objectives that nobody can meet."""
    more = ["--processes", "2", "--shape", "ramp", "--shape-period", "6", "--slo-ttft", "0.000001"]
    rows = locust(service, "-u", "6", "-t", "12s", *more, status=1)
    assert {row["name"] for row in rows} == {"motley.v1", "openai", "kserve"}
    for row in rows:
        assert row["num_failures"] == row["num_requests"] * (row["method"] == "goodput"), row["method"]


def test_a_service_that_is_not_there_is_told_in_a_line(service: Served) -> None:
    command = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(FILE),
        "--headless",
        "--host",
        "http://127.0.0.1:1",
        "-t",
        "3s",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode != 0
    assert "no service answers at http://127.0.0.1:1" in run.stderr
