"""Every query of the dashboards, on a Prometheus that scrapes a service while one thing after the other befalls it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from control_client import Plane
from grafana_dashboards.panels import DASHBOARDS
from prometheus_server import BINARY, Prometheus, scraping
from serve_process import Served, command_line, served, wait_for

from motley.client import Client
from motley.cluster.fleet.control.control_contact import find_contacts
from motley.replicas.errors import MotleyError

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(BINARY is None, reason="no Prometheus")]

SETTLE_S = 6.0  # from a fault to figures that show it: published each second, and scraped each second
RATE = "6s"  # of rates, for Grafana's $__rate_interval
PROMPT = "x" * 400  # has blocks to be found again
MANY = 8
GPU = {"simulate": "P40", "simulate_model": "qwen2.5-7b", "replicas": {"min": 0, "max": 1, "start": 0}}
CPU = {
    "engine": {"threads": 1, "kv_memory": "1MiB", "max_running": 4, "speculate_ngram": 2},
    "replicas": {"min": 0, "max": 2, "start": 1},
}
FLEET = {"pools": [{"name": "cpu", **CPU}, {"name": "p40", **GPU}], "queue": {"hold_s": 8}}
SLO, STRICT_SLO = {"ttft_ms": 60_000, "tpot_ms": 50_000}, {"ttft_ms": 1, "tpot_ms": 1}

# By a panel's title and its lines, in their order: the fault that each is to show, and what the line does then.
UP, DOWN, ANOTHER = "up", "down", "another value"
EFFECTS = {
    "Requests": [("first requests", UP)] * 2,
    "Tokens": [("first requests", UP)] * 2,
    "Under way": [("crowd", UP), ("crowd", UP), ("none left", UP)],
    "Lengths": [("long prompts", UP), ("crowd", UP)],
    "Time to first token": [("crowd", UP)] * 3 + [("strict objectives", DOWN)],
    "Time per token": [("slower GPU", UP)] * 3 + [("strict objectives", DOWN)],
    "Late answers": [("strict objectives", UP)],
    "Time to the end": [("crowd", UP)] * 3,
    "Parts of a request": [("woken", UP), ("crowd", UP), ("long prompts", UP), ("crowd", UP)],
    "Time between messages": [("slower GPU", UP)] * 3,
    "Ends": [("first requests", UP)],
    "Refusals": [("refusals", UP)],
    "Failures": [("none left", UP), ("killed", UP)],
    "Replicas": [("scaled up", UP)],
    "Sequences": [("crowd", UP)] * 2,
    "Tokens of a replica": [("first requests", UP)],
    "KV in use": [("crowd", UP)],
    "Preemptions": [("drained", UP)],
    "Accepted drafts": [("drained", ANOTHER)],
    "Wanted and serving": [("scaled up", UP)] * 3 + [("drained", UP)],
    "Decisions": [("scaled up", UP)],
    "Where prompts come from": [("repeats", UP), ("found in Redis", UP), ("repeats", DOWN)],
    "Fetches": [("found in Redis", UP)] * 3,
    "Bytes": [("found in Redis", UP), ("repeats", UP)],
    "Failures of the cache": [("Redis hangs", UP)] * 2,
}
PANELS = {panel.title: panel for board in DASHBOARDS for panels in board.rows.values() for panel in panels}


class Faults:
    """All that befalls the service. at: when each began, in Unix seconds, by its name."""

    def __init__(self, service: Served, path: Path) -> None:
        self.at: dict[str, float] = {}
        self._service, self._path = service, path
        [contact] = [one for one in find_contacts() if one.address == service.endpoints["admin"]]
        self.plane = Plane(contact)

    @contextmanager
    def fault(self, name: str) -> Iterator[None]:
        self.at[name] = time.time()
        yield
        time.sleep(SETTLE_S)

    def stream(self, prompt: str, tokens: int = 8) -> None:
        with Client(self._service.grpc, retries=0, timeout_s=170) as client:
            for _ in client.stream(prompt, max_tokens=tokens, ignore_eos=True, temperature=0.0):
                pass

    @contextmanager
    def streams(self, name: str, count: int, tokens: int) -> Iterator[None]:
        """Have so many streams beside what is done, and wait for their end."""
        with ThreadPoolExecutor(count) as threads:
            running = [threads.submit(self.stream, f"{number} {name}", tokens) for number in range(count)]
            yield
            for one in running:
                one.result(170)

    def process(self, part: str) -> int:
        """Process id of the service's only process with that in its command line."""
        [pid] = [pid for pid in self._service.descendants() if part in command_line(pid)]
        return pid

    def apply(self, slo: dict[str, int]) -> None:
        self._path.write_text(yaml.safe_dump(yaml.safe_load(self._path.read_text()) | {"slo": slo}))
        command = [sys.executable, "-m", "motley", "serve", str(self._path)]
        ports = ["--http-port", str(self._service.http_port), "--grpc-port", str(self._service.grpc_port)]
        subprocess.run([*command, *ports], check=True, capture_output=True, timeout=120)


@pytest.fixture(scope="module")
def told(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, dict[str, float]]]:
    """A Prometheus that has seen all of it, and when each fault began; the last is the end."""
    folder = tmp_path_factory.mktemp("grafana")
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(FLEET | {"model": str(checkpoint), "slo": SLO}))
    with served([str(path)], folder) as service:
        service.wait_ready()
        with scraping(service.http, folder) as prometheus:
            faults = Faults(service, path)
            with faults.fault("nothing"):
                pass
            befall(faults)
            with faults.fault("end"):
                pass
            yield prometheus, faults.at


def befall(faults: Faults) -> None:
    plane = faults.plane
    with faults.fault("first requests"):
        for number in range(MANY):
            faults.stream(f"{number} first")
    with faults.fault("crowd"), faults.streams("crowd", 12, 250):
        pass
    with faults.fault("repeats"):
        for _ in range(MANY):
            faults.stream(PROMPT)
    with faults.fault("long prompts"):
        for number in range(MANY):
            faults.stream(str(number) + "long" * 250)
    with faults.fault("refusals"):
        for _ in range(MANY):
            with pytest.raises(MotleyError):
                faults.stream(PROMPT, -1)
    with faults.fault("scaled up"):
        plane.scale(2, "cpu")
        plane.wait(2, "cpu")
    with faults.fault("drained"), faults.streams("stream", 4, 2000):
        wait_for(lambda: all(one.running for one in plane.pool_of("cpu").replicas), "work for both")
        plane.scale(1, "cpu")
    plane.wait(1, "cpu")
    with faults.fault("killed"), faults.streams("killed", 2, 1000):
        wait_for(lambda: any(one.running for one in plane.pool_of("cpu").replicas), "a stream that runs")
        os.kill(faults.process("ServeReplica:motley:cpu"), signal.SIGKILL)
    with faults.fault("found in Redis"):
        for number in range(MANY):
            faults.stream(f"{PROMPT}{number}")
    with faults.fault("Redis hangs"):
        os.kill(faults.process("unixsocket:"), signal.SIGSTOP)
        for number in range(MANY):
            faults.stream(f"{number}{PROMPT}")
    os.kill(faults.process("unixsocket:"), signal.SIGCONT)
    with faults.fault("strict objectives"):
        faults.apply(STRICT_SLO)
        for number in range(MANY):
            faults.stream(f"{number} late")
    with faults.fault("slower GPU"):
        plane.scale(1, "p40")
        plane.wait(1, "p40")
        plane.scale(0, "cpu")
        plane.wait(0, "cpu")
        with faults.streams("slower", 2, 100):
            pass
    with faults.fault("none left"):
        plane.scale(0, "p40")
        plane.wait(0, "p40")
        with pytest.raises(MotleyError):
            faults.stream("held")
    with faults.fault("woken"):
        plane.scale(1, "cpu")
        for _ in range(20):  # a start may take longer than a request is held
            with suppress(MotleyError):
                faults.stream("held until there is one")
                break


def test_each_panel_has_a_fault() -> None:
    assert {title: len(panel.queries) for title, panel in PANELS.items()} == {
        title: len(effects) for title, effects in EFFECTS.items()
    }


@pytest.mark.parametrize("title", PANELS)
def test_each_line_of_a_panel_shows_its_fault(title: str, told: tuple[Prometheus, dict[str, float]]) -> None:
    prometheus, at = told
    for query, (fault, how) in zip(PANELS[title].queries, EFFECTS[title], strict=True):
        expression = query.expression.replace("$__rate_interval", RATE).replace("$pool", ".*")
        points = prometheus.query_range(expression, at["nothing"], at["end"])
        assert len({value for _, value in points}) >= 2, f"{query.legend}: always the same"
        windows = [[value for when, value in points if at[one] <= when < at[after]] for one, after in pairwise(at)]
        *earlier, after = windows[: list(at).index(fault) + 1]
        assert after, f"{query.legend}: nothing is told of {fault}"
        before = next((values for values in reversed(earlier) if values), None)
        if before is None:
            continue
        told_by_it = (
            f"{query.legend}: {min(before)} to {max(before)} before, {min(after)} to {max(after)} after {fault}"
        )
        assert shown(before, after, how), told_by_it


def shown(before: list[float], after: list[float], how: str) -> bool:
    if how == UP:
        return max(after) > max(before)
    return min(after) < min(before) if how == DOWN else not set(after) <= set(before)
