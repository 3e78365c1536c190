"""The dashboards of deploy/grafana: written from their tables, and of metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_dashboards.__main__ import FOLDER, files
from grafana_dashboards.panels import DASHBOARDS

from motley.cluster.metrics.metrics_table import METRICS

SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
NAMES = {f"motley_{name}{suffix}" for name, metric in METRICS.items() for suffix in SUFFIXES[metric.kind]}
QUERIES = [
    query.expression
    for dashboard in DASHBOARDS
    for panels in dashboard.rows.values()
    for panel in panels
    for query in panel.queries
]


def test_the_files_are_what_the_tables_say() -> None:
    assert {path: path.read_text() for path in FOLDER.glob("*.json")} == dict(files())


@pytest.mark.parametrize("query", QUERIES)
def test_each_query_asks_for_what_there_is_and_hides_no_absence(query: str) -> None:
    asked = re.findall(r"motley_\w+", query)
    assert asked
    assert set(asked) <= NAMES
    assert "vector" not in query


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_panels_have_names_and_places_of_their_own(path: Path) -> None:
    board: dict[str, Any] = json.loads(path.read_text())
    assert path.stem == board["uid"]
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert all(x < 24 for x, _ in cells)
    for panel in panels:
        references = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(references)) == len(references)


def test_what_grafana_is_provisioned_with_is_what_it_reads() -> None:
    """By Grafana's documentation: its server is not at hand."""
    folder = FOLDER.parent / "provisioning"
    [source] = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://127.0.0.1:9090")
    [provider] = yaml.safe_load((folder / "dashboards" / "motley.yml").read_text())["providers"]
    assert provider["type"] == "file"
    assert Path(provider["options"]["path"]).is_absolute()
