"""Spans are read in order, no further than the lead, and what somebody waits for in any case."""

from __future__ import annotations

import threading
import time

import pytest

from motley.replicas.checkpoint.reading.read_ahead import ReadAhead

SPANS = dict.fromkeys("abcdefgh", 10)


class Disk:
    """Notes what is read. fails: on that one."""

    def __init__(self, fails: str = "") -> None:
        self.read: list[str] = []
        self._fails = fails

    def __call__(self, span: str) -> None:
        self.read.append(span)
        if span == self._fails:
            raise OSError(5, f"{span} cannot be read")


def _until(disk: Disk, count: int) -> None:
    until = time.monotonic() + 30
    while len(disk.read) < count and time.monotonic() < until:
        time.sleep(0.005)


def test_nothing_is_read_before_somebody_wants_something() -> None:
    disk = Disk()
    ahead = ReadAhead(SPANS, disk)
    time.sleep(0.05)
    assert disk.read == []
    ahead.wait("c")
    _until(disk, len(SPANS))
    assert disk.read == list(SPANS), "in order, all of it"
    ahead.close()


def test_no_more_is_read_than_the_lead_but_what_somebody_waits_for() -> None:
    disk = Disk()
    ahead = ReadAhead(SPANS, disk, lead=25)
    ahead.wait("a")
    _until(disk, 3)
    time.sleep(0.05)
    assert disk.read == list("abc")
    ahead.wait("g")
    assert disk.read == list("abcg")
    for used in "abg":
        ahead.used(used)
    _until(disk, 6)
    time.sleep(0.05)
    assert disk.read == list("abcgde")
    ahead.close()


def test_who_wants_what_is_at_hand_waits_for_nobody() -> None:
    reads: dict[str, threading.Thread] = {}

    def read(span: str) -> None:
        reads[span] = threading.current_thread()

    ahead = ReadAhead(SPANS, read, at_hand=lambda span: span in "bc", lead=10)
    for span in "bb":
        ahead.wait(span)
    assert reads == {"b": threading.current_thread()}, "and nothing is read ahead yet"
    ahead.used("b")
    ahead.wait("a")
    ahead.wait("c")
    assert [reads[span] is threading.current_thread() for span in "abc"] == [False, True, True]
    ahead.close()


def test_what_cannot_be_read_is_told_whoever_waits_for_it() -> None:
    disk = Disk(fails="b")
    ahead = ReadAhead(SPANS, disk)
    ahead.wait("c")
    for _ in range(2):
        with pytest.raises(OSError, match="b cannot be read"):
            ahead.wait("b")
    ahead.wait("d")
    ahead.close()


def test_who_waits_when_it_is_closed_is_told() -> None:
    began, goes = threading.Event(), threading.Event()

    def read(_: str) -> None:
        began.set()
        goes.wait(30)

    ahead = ReadAhead(SPANS, read)
    told: list[str] = []

    def wait() -> None:
        with pytest.raises(RuntimeError, match="closed before"):
            ahead.wait("h")
        told.append("h")

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert began.wait(30)
    closing = threading.Thread(target=ahead.close)
    closing.start()
    waiting.join(30)
    assert told == ["h"]
    goes.set()
    closing.join(30)
    assert not closing.is_alive()


def test_closed_before_it_began() -> None:
    ReadAhead(SPANS, Disk()).close()
