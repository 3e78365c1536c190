"""A scraper of `GET /metrics`, again and again, that notes every count which falls."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterable
from types import TracebackType

from prometheus_client.parser import text_string_to_metric_families

Sample = tuple[str, tuple[tuple[str, str], ...]]  # name and labels
Scrape = dict[Sample, float]
COUNTS = ("_total", "_count", "_sum", "_bucket")  # how names of what only grows end


def scrape(http: str, key: str = "") -> Scrape:
    """Return all samples, over a connection of its own: with several ingresses any of them tells."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urllib.request.urlopen(urllib.request.Request(f"{http}/metrics", headers=headers), timeout=60) as response:
        text = response.read().decode()
    families = text_string_to_metric_families(text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def total(samples: Scrape, name: str) -> float:
    """Return the sum of all samples of that name."""
    return sum(value for (each, _), value in samples.items() if each == name)


def growth(before: Scrape, after: Scrape, names: Iterable[str]) -> dict[str, float]:
    return {name: total(after, name) - total(before, name) for name in names}


class Scraper:
    """Scrapes as long as the context is open.

    last     the last scrape
    scrapes  number of scrapes so far
    fallen   samples of what only grows that were less than before, or gone
    """

    def __init__(self, http: str, key: str = "") -> None:
        self._http, self._key = http, key
        self.last: Scrape = {}
        self.scrapes = 0
        self.fallen: list[Sample] = []
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Scraper:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                found = scrape(self._http, self._key)
            except OSError:  # the ingress that was asked is lost: a scraper tries again
                self._stop.wait(0.1)
                continue
            except BaseException as error:
                self._failure = error
                raise
            counts = {sample: value for sample, value in self.last.items() if sample[0].endswith(COUNTS)}
            self.fallen += [sample for sample, value in counts.items() if found.get(sample, -1.0) < value]
            self.last, self.scrapes = found, self.scrapes + 1
