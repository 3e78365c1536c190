"""Writes each dashboard as the JSON that Grafana imports, by the types of Grafana's own SDK."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from string import ascii_uppercase

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

from .panels import DASHBOARDS, DashboardSpec, PanelSpec

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "dashboards"
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_COLUMNS, _HEIGHT = 24, 8  # Grafana's grid
_IN_A_ROW = 3


def dashboard_json(spec: DashboardSpec) -> str:
    """Return the file of a dashboard."""
    pools = dashboard.QueryVariable("pool").label("Pool").datasource(_SOURCE).multi(True).include_all(True)
    built = (
        dashboard.Dashboard(spec.title)
        .uid(spec.uid)
        .tags(["motley"])
        .refresh("10s")
        .time("now-30m", "now")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            pools.query("label_values(motley_generation_tokens_total, pool)").refresh(
                VariableRefresh.ON_TIME_RANGE_CHANGED
            )
        )
    )
    numbers = itertools.count(1)
    for title, panels in spec.rows.items():
        built = built.with_row(dashboard.Row(title).id(next(numbers)))
        for panel in panels:
            built = built.with_panel(_panel(panel, _COLUMNS // min(len(panels), _IN_A_ROW)).id(next(numbers)))
    return JSONEncoder(sort_keys=True, indent=1).encode(built.build()) + "\n"


def files() -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each dashboard's file."""
    for spec in DASHBOARDS:
        yield FOLDER / f"{spec.uid}.json", dashboard_json(spec)


def _panel(spec: PanelSpec, columns: int) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .title(spec.title)
        .description(spec.meaning)
        .unit(spec.unit)
        .datasource(_SOURCE)
        .span(columns)
        .height(_HEIGHT)
        .min(0)
    )
    if spec.stacked:
        panel = panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(30)
    for letter, query in zip(ascii_uppercase, spec.queries, strict=False):
        target = prometheus.Dataquery().ref_id(letter).datasource(_SOURCE)
        panel = panel.with_target(target.expr(query.expression).legend_format(query.legend))
    return panel


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in files():
        path.write_text(text)
        print(f"written: {path.relative_to(FOLDER.parents[2])}")


if __name__ == "__main__":
    main()
