"""The ledger of all processes' counts: nothing falls, and nothing counts twice, whoever ends when."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable

import hypothesis.strategies as st
import pytest
from engine_parts import Clock
from hypothesis import given

from motley.cluster.metrics import metrics_ledger, metrics_publisher
from motley.cluster.metrics.metric_records import MemoryRecords
from motley.cluster.metrics.metric_series import MetricSeries, SourceRecord, total_series
from motley.cluster.metrics.metrics_ledger import ENDED_S, MAX_ENDED, MetricsLedger
from motley.cluster.metrics.metrics_publisher import ALIVE_S, MetricsPublisher
from motley.replicas.kv.histogram import HistogramSnapshot

POOL = (("model_name", "tiny"), ("pool", "cpu"))


def everybody(name: str, age_s: float) -> bool:
    return True


def counted(total: float, running: float = 0.0) -> list[MetricSeries]:
    return [
        MetricSeries("counter", "generation_tokens", POOL, total),
        MetricSeries("gauge", "num_requests_running", POOL, running),
        MetricSeries("gauge", "kv_cache_usage_perc", POOL, 0.5 if running else 0.1),
    ]


def values(series: Iterable[MetricSeries]) -> dict[str, object]:
    return {each.name: each.value for each in series}


def test_counters_are_summed_over_all_and_gauges_over_those_that_live() -> None:
    ledger = MetricsLedger(MemoryRecords(), "app", Clock())
    assert ledger.totals(everybody) == ()
    ledger.write("replica/a", counted(10, running=3))
    ledger.write("replica/b", counted(5, running=0))
    assert values(ledger.totals(everybody)) == {
        "generation_tokens": 15, "num_requests_running": 3, "kv_cache_usage_perc": pytest.approx(0.3),
    }  # fmt: skip
    ledger.write("replica/b", counted(7))
    only_b: Callable[[str, float], bool] = lambda name, age_s: name == "replica/b"  # noqa: E731
    assert values(ledger.totals(only_b)) == {
        "generation_tokens": 17, "num_requests_running": 0, "kv_cache_usage_perc": 0.1,
    }  # fmt: skip


def test_of_the_control_planes_runs_the_latest_alone_lives() -> None:
    """Else each pool would want twice as many replicas for a while after a restart."""
    clock = Clock()
    ledger = MetricsLedger(MemoryRecords(), "app", clock)
    ledger.write("control/1", counted(10, running=3))
    clock.now += 1.0
    ledger.write("control/2", counted(0, running=3))
    assert values(ledger.totals(everybody)).items() >= {"generation_tokens": 10, "num_requests_running": 3}.items()


def test_applications_do_not_count_one_another() -> None:
    records = MemoryRecords()
    MetricsLedger(records, "one", Clock()).write("replica/a", counted(10))
    assert MetricsLedger(records, "two", Clock()).totals(everybody) == ()


def test_the_age_of_a_record_is_told() -> None:
    clock, ages = Clock(), list[float]()
    ledger = MetricsLedger(MemoryRecords(), "app", clock)
    ledger.write("ingress/a", counted(1))
    clock.now += 7.0
    ledger.totals(lambda name, age_s: not ages.append(age_s))
    assert ages == [7.0]


def test_a_record_is_read_as_it_was_written() -> None:
    spread = HistogramSnapshot((0.5, 1.0), (1, 2, 3), 9.5)
    series = (*counted(3), MetricSeries("histogram", "request_queue_time_seconds", POOL, spread))
    record = SourceRecord(12.5, series, frozenset({"replica/a"}))
    assert SourceRecord.decode(record.encode()) == record
    [summed] = total_series([series[-1], series[-1]])
    assert summed.value == HistogramSnapshot((0.5, 1.0), (2, 4, 6), 19.0)
    other = MetricSeries("histogram", "request_queue_time_seconds", POOL, HistogramSnapshot((2.0,), (1, 0), 1.0))
    assert total_series([series[-1], other])[0].value == other.value, "buckets of another version are not added"


STEPS = st.lists(
    st.tuples(st.sampled_from(["count", "end", "wait", "read", "read"]), st.integers(0, 3)), min_size=20, max_size=80
)


@given(STEPS)
def test_no_total_falls_and_each_count_counts_once(steps: list[tuple[str, int]]) -> None:
    """So many processes end that their records are summed, by two readers that take turns."""
    clock, records = Clock(), MemoryRecords()
    readers = [MetricsLedger(records, "app", clock) for _ in range(2)]
    living: list[int] = []
    done: Counter[int] = Counter()
    born = seen = 0
    for what, which in steps:
        if what == "end":  # all of them, and more than are kept by themselves come
            living = list(range(born, born + MAX_ENDED + 2))
            born += len(living)
        if what in ("count", "end"):
            for number in living:
                done[number] += which
                readers[0].write(f"replica/{number}", counted(done[number], running=1))
        elif what == "wait":
            clock.now += ENDED_S / 2
        elif what == "read":
            alive = {f"replica/{number}" for number in living}
            found = values(readers[which % 2].totals(lambda name, age_s, alive=alive: name in alive))
            assert found.get("generation_tokens", 0) == sum(done.values()) >= seen
            assert found.get("num_requests_running", 0) == len(living)
            seen = sum(done.values())
    sources = records.keys(b"metrics/app/source/")
    assert len(sources) <= born


def test_records_of_ended_processes_become_one() -> None:
    clock, records = Clock(), MemoryRecords()
    ledger = MetricsLedger(records, "app", clock)
    for number in range(100):
        ledger.write(f"replica/{number}", counted(1))
    clock.now += ENDED_S + 1
    nobody: Callable[[str, float], bool] = lambda name, age_s: False  # noqa: E731
    for _ in range(2):
        assert values(ledger.totals(nobody)) == {"generation_tokens": 100}
        assert len(records.keys()) == 1


def test_a_reader_begins_anew_where_records_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process sums records while this one reads."""
    clock, records = Clock(), MemoryRecords()
    reader, other = (MetricsLedger(records, "app", clock) for _ in range(2))
    for number in range(MAX_ENDED + 1):
        other.write(f"replica/{number}", counted(1))
    clock.now += ENDED_S + 1
    first = iter([True])

    def read(key: bytes) -> bytes | None:
        if next(first, False):
            other.totals(lambda name, age_s: False)
        return records.get(key)

    monkeypatch.setattr(records, "read", read)
    assert values(reader.totals(lambda name, age_s: False))["generation_tokens"] == MAX_ENDED + 1


def test_of_two_that_sum_at_a_time_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, records = Clock(), MemoryRecords()
    one, other = (MetricsLedger(records, "app", clock) for _ in range(2))
    for number in range(MAX_ENDED + 1):
        one.write(f"replica/{number}", counted(1))
    clock.now += ENDED_S + 1
    first, create = iter([True]), records.create

    def late(key: bytes, value: bytes) -> bool:
        if next(first, False):
            other.totals(lambda name, age_s: False)
        return create(key, value)

    monkeypatch.setattr(records, "create", late)
    for ledger in (one, other):
        assert values(ledger.totals(lambda name, age_s: False)) == {"generation_tokens": MAX_ENDED + 1}
    assert len(records.keys()) == 1


def test_a_reader_that_never_succeeds_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    records = MemoryRecords()
    ledger = MetricsLedger(records, "app", Clock())
    ledger.write("replica/a", counted(1))
    monkeypatch.setattr(records, "read", lambda key: None)
    with pytest.raises(RuntimeError, match=f"vanished in {metrics_ledger.MAX_READS} readings"):
        ledger.totals(everybody)


async def test_a_process_writes_what_has_changed_and_that_it_lives() -> None:
    clock, records = Clock(), MemoryRecords()
    total, exported = [1.0], list[float]()

    class Exporter:
        def export(self, series: Iterable[MetricSeries]) -> None:
            exported.append(values(series)["generation_tokens"])  # type: ignore[arg-type]

    ledger = MetricsLedger(records, "app", clock)
    publisher = MetricsPublisher("replica/a", lambda: counted(total[0]), ledger, Exporter())
    await publisher.publish()
    await publisher.publish()
    assert exported == [1.0], "nothing has changed"
    total[0] = 2.0
    await publisher.publish()
    await publisher.publish(alive_s=0.0)
    assert exported == [1.0, 2.0, 2.0]
    assert ALIVE_S < ENDED_S / 10, "whoever lives is not taken to have ended"
    assert values(ledger.totals(everybody))["generation_tokens"] == 2.0


async def test_an_error_does_not_end_publication(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged when it begins, not each second; and once it is gone the metrics are published again."""
    calls, published = 0, asyncio.Event()

    def collect() -> Iterable[MetricSeries]:
        nonlocal calls
        calls += 1
        if calls in (2, 3, 5):
            raise RuntimeError("no cluster")
        if calls == 6:
            published.set()
        return counted(calls)

    monkeypatch.setattr(metrics_publisher, "PERIOD_S", 0.0)
    publisher = MetricsPublisher("replica/a", collect, MetricsLedger(MemoryRecords(), "app", Clock()))
    with caplog.at_level(logging.ERROR):
        task = asyncio.create_task(publisher.run())
        await published.wait()
        task.cancel()
    logged = [record for record in caplog.records if record.name == metrics_publisher.log.name]
    assert [record.exc_text is not None for record in logged] == [True, True]


async def test_older_series_are_not_written_over_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape publishes beside the task that does so each second, whose thread may be the slower one."""
    total, held = [1.0], list[Callable[[], None]]()
    ledger = MetricsLedger(MemoryRecords(), "app", Clock())
    publisher = MetricsPublisher("ingress/a", lambda: counted(total[0]), ledger)

    async def late(work: Callable[..., None], *given: object) -> None:
        held.append(lambda: work(*given))

    monkeypatch.setattr(asyncio, "to_thread", late)
    for total[0] in (1.0, 2.0):
        await publisher.publish()
    for work in reversed(held):
        work()
    assert values(ledger.totals(everybody))["generation_tokens"] == 2.0
