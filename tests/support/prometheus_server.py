"""A Prometheus that scrapes a service once a second, and what it answers to queries."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from serve_process import free_port, wait_for

BINARY = shutil.which("prometheus")  # Debian's package


class Prometheus:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def query_range(self, query: str, begin: float, end: float) -> list[tuple[float, float]]:
        """Unix seconds and values of all series that the query yields, second by second; those that are no number are
        left out.
        """
        found = self._ask("query_range", query=query, start=begin, end=end, step=1)
        points = [(float(at), float(value)) for series in found for at, value in series["values"]]
        return [(at, value) for at, value in points if math.isfinite(value)]

    def _ask(self, name: str, **given: Any) -> Any:
        with urllib.request.urlopen(
            f"{self.url}/api/v1/{name}?{urllib.parse.urlencode(given)}", timeout=30
        ) as response:
            return json.load(response)["data"]["result"]


@contextmanager
def scraping(http: str, folder: Path, key: str = "") -> Iterator[Prometheus]:
    """Scrape the service at that address from now on, by a copy of deploy/prometheus.yml that differs in the target,
    the key and the interval alone.
    """
    config = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    [job] = config["scrape_configs"]
    job["static_configs"] = [{"targets": [urllib.parse.urlsplit(http).netloc]}]
    if key:
        job["authorization"] = {"credentials": key}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    server = Prometheus(port := free_port())
    assert BINARY is not None
    command = [BINARY, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        wait_for(lambda: _ready(server), "Prometheus")
        yield server
    finally:
        process.terminate()
        process.wait()


def _ready(server: Prometheus) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/-/ready", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
