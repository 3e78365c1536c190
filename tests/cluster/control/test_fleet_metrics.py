"""The control plane's metrics: each decision counts once, and each pool has its numbers of replicas."""

from __future__ import annotations

from collections.abc import Mapping

from fake_fleet import Bench

from motley.cluster.fleet.control.fleet_metrics import FleetMetrics


def told(metrics: FleetMetrics) -> Mapping[str, float]:
    """Values of pool cpu by name, and by direction and author where there are such."""
    found = {}
    for each in metrics.series():
        labels = dict(each.labels)
        assert labels.pop("pool") == "cpu"
        assert isinstance(each.value, int | float)
        found[" ".join((each.name, *(labels[name] for name in ("direction", "by") if name in labels)))] = each.value
    return found


async def test_each_decision_is_counted_once_by_its_direction_and_its_author() -> None:
    bench = Bench(1)
    await bench.scale(2)
    metrics = FleetMetrics(bench.plane)
    decisions = {f"scaling_decisions {way} {by}": 0 for way in ("up", "down") for by in ("policy", "operator")}
    assert told(metrics).items() >= decisions.items(), "those before it began are of an earlier run"
    await bench.scale(4)
    await bench.scale(1, by="policy queue")
    for _ in range(2):
        assert (
            told(metrics).items()
            >= (decisions | {"scaling_decisions up operator": 1, "scaling_decisions down policy": 1}).items()
        )


async def test_how_many_replicas_there_should_be_and_what_becomes_of_the_others() -> None:
    bench = Bench(1)
    metrics = FleetMetrics(bench.plane)
    await bench.steps()
    assert counts(metrics) == (1, 0, 0)
    bench.fleet.room = 2
    await bench.scale(4)
    await bench.steps()
    assert counts(metrics) == (4, 2, 0), "two find no place"
    bench.fleet.work = dict.fromkeys(bench.fleet.replicas("cpu"), 1)
    await bench.scale(1)
    await bench.steps()
    assert counts(metrics) == (1, 0, 1), "one ends what it has begun"


def counts(metrics: FleetMetrics) -> tuple[float, ...]:
    return tuple(told(metrics)[f"num_replicas_{name}"] for name in ("wanted", "starting", "draining"))
