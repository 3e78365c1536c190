"""A service under the load of clients, and the full log of what became of each request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from serve_process import Served

from motley.client import Client

TOKENS = 64


@dataclass
class Load:
    """Clients that ask again and again, and the full log of what became of it: by request, how it ended."""

    address: str
    ends: dict[str, list[str]] = field(default_factory=dict)
    stopped: threading.Event = field(default_factory=threading.Event)

    def ask(self, name: str) -> None:
        log = self.ends.setdefault(name, [])
        ids: list[int] = []
        usages, reasons = [], []
        try:
            with Client(self.address, retries=0, timeout_s=170) as client:  # that none is lost is the service's doing
                for chunk in client.stream(f"Once {name}", max_tokens=TOKENS, ignore_eos=True, temperature=0.0):
                    for choice in chunk.choices:
                        ids += choice.token_ids
                        reasons += [choice.finish_reason] if choice.finish_reason else []
                    usages += [chunk.usage.completion_tokens] if chunk.HasField("usage") else []
        except Exception as error:  # noqa: BLE001  whatever it is, it is in the log
            log.append(repr(error))
        else:
            whole = (len(ids), usages, len(reasons)) == (TOKENS, [TOKENS], 1)
            log.append("whole" if whole else f"{len(ids)} tokens, usages {usages}, ends {reasons}")

    def _client(self, number: int) -> None:
        count = 0
        while not self.stopped.wait(0.05):
            count += 1
            self.ask(f"{number}-{count}")


@contextmanager
def load(service: Served, clients: int) -> Iterator[Load]:
    """At its end: each request that was sent has ended once, and whole."""
    running = Load(service.grpc)
    threads = [threading.Thread(target=running._client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield running
    finally:
        running.stopped.set()
        for thread in threads:
            thread.join(180)
    assert not any(thread.is_alive() for thread in threads)
    bad = {name: ends for name, ends in running.ends.items() if ends != ["whole"]}
    assert bad == {}, f"of {len(running.ends)} requests these did not end once, and whole: {bad}"
    assert len(running.ends) > clients
