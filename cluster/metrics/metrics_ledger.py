"""Ledger of what every process of a service has counted, those that have ended included.

Each process writes a record of its own, about once a second, and nobody else writes it: so no count is lost or counted
twice, whoever ends when. Whoever reads sums the records. Records of processes that ended long ago are summed into one,
numbered record: whoever creates the next number has done it, since only one process can create it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from .metric_records import Records
from .metric_series import MetricSeries, SourceRecord, total_series
from .metrics_table import METRICS

__all__ = ["CONTROL", "ENDED_S", "MetricsLedger"]

ENDED_S = 600.0  # a process whose record is older has ended: it writes one every few seconds as long as it lives
MAX_ENDED = 32  # records of ended processes that are kept by themselves
MAX_READS = 8  # readings in which records vanish are begun anew; more than one is rare
_SOURCE, _FOLDED = "source/", "folded/"
CONTROL = "control/"  # what the names of runs of the control plane begin with, of which the latest alone lives
_MEANS = {name for name, metric in METRICS.items() if metric.is_mean}


class MetricsLedger:
    """Ledger of one application. Every call asks the cluster, and may take milliseconds.

    records  where records are kept
    app      name of the application
    clock    returns Unix seconds
    """

    def __init__(self, records: Records, app: str, clock: Callable[[], float]) -> None:
        self._records = records
        self._prefix = f"metrics/{app}/"
        self._clock = clock

    def write(self, source: str, series: Collection[MetricSeries]) -> None:
        """Write the record of one process, in place of its last one."""
        record = SourceRecord(self._clock(), tuple(series))
        self._records.write(self._key(_SOURCE + source), record.encode())

    def totals(self, living: Callable[[str, float], bool]) -> tuple[MetricSeries, ...]:
        """Return the sums of all series: of counters and histograms over all processes that there have been, of gauges
        over those that live. Shares are not summed: they are means.

        living  returns whether a process lives, from its name and the seconds since its last record
        """
        now = self._clock()
        folded, sources = self._read()
        found, ended = list(folded.series), list[str]()
        latest = max((record.at for name, record in sources.items() if name.startswith(CONTROL)), default=0.0)
        for name, record in sources.items():
            replaced = name.startswith(CONTROL) and record.at < latest
            lives = living(name, now - record.at) and not replaced
            found += [each for each in record.series if lives or each.kind != "gauge"]
            if not lives and now - record.at > ENDED_S:
                ended.append(name)
        if len(ended) > MAX_ENDED:
            self._fold(ended)
        return total_series(found, _MEANS)

    def _read(self) -> tuple[SourceRecord, dict[str, SourceRecord]]:
        """Return the summed record of ended processes, and the records of all others."""
        for _ in range(MAX_READS):
            names = self._names()
            number = max((int(name.removeprefix(_FOLDED)) for name in names if name.startswith(_FOLDED)), default=0)
            folded = SourceRecord(0.0, ())
            if number:
                written = self._records.read(self._key(f"{_FOLDED}{number}"))
                if written is None:  # a higher number has taken its place
                    continue
                folded = SourceRecord.decode(written)
            wanted = {name.removeprefix(_SOURCE) for name in names if name.startswith(_SOURCE)} - folded.sources
            read = {name: self._records.read(self._key(_SOURCE + name)) for name in sorted(wanted)}
            if all(record is not None for record in read.values()):  # else they have been summed meanwhile
                return folded, {name: SourceRecord.decode(record) for name, record in read.items() if record}
        raise RuntimeError(f"records of metrics vanished in {MAX_READS} readings, one after the other")

    def _fold(self, ended: Collection[str]) -> None:
        """Sum the records of these processes into the next numbered record, unless another process does just that."""
        names = self._names()
        number = max((int(name.removeprefix(_FOLDED)) for name in names if name.startswith(_FOLDED)), default=0)
        folded, sources = self._read()
        gone = {name: sources[name] for name in ended if name in sources}
        counts = [each for record in (folded, *gone.values()) for each in record.series if each.kind != "gauge"]
        still = {name for name in folded.sources if _SOURCE + name in names}  # of which the records are yet to go
        record = SourceRecord(self._clock(), total_series(counts), frozenset({*still, *gone}))
        own = f"{_FOLDED}{number + 1}"
        if not self._records.create(self._key(own), record.encode()):
            return
        if any(int(name.removeprefix(_FOLDED)) > number + 1 for name in self._names() if name.startswith(_FOLDED)):
            self._records.delete(self._key(own))  # others were faster, twice
            return
        for name in record.sources:
            self._records.delete(self._key(_SOURCE + name))
        if number:
            self._records.delete(self._key(f"{_FOLDED}{number}"))

    def _names(self) -> set[str]:
        keys = self._records.keys(self._prefix.encode())
        return {key.decode().removeprefix(self._prefix) for key in keys}

    def _key(self, name: str) -> bytes:
        return (self._prefix + name).encode()
