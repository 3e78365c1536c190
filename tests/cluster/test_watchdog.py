"""Decisions of `motley serve` about processes that end or hang, over processes that are made up; and real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from serve_process import wait_for

from motley.cluster.service.supervision import watchdog as watching
from motley.cluster.service.supervision.watchdog import (
    BUSY,
    CURES,
    MISSES,
    ChildProcess,
    ProbedProcess,
    ServiceWatchdog,
)


class Made:
    """A process that has ended as it says, or runs."""

    def __init__(self, status: int | None = None) -> None:
        self.status = status
        self.pid = os.getpid()  # which is nobody's child here

    def poll(self) -> int | None:
        return self.status


def watch(daemons: list[ChildProcess], asked: list[ProbedProcess], told: list[str] | None = None) -> ServiceWatchdog:
    made = ServiceWatchdog((told if told is not None else []).append, lambda: None)
    made._daemons += daemons
    made._probed += asked
    return made


def daemon(status: int | None, **said: Any) -> ChildProcess:
    process: Any = Made(status)
    return ChildProcess("Ray's raylet", process, **said)


def nothing() -> None:
    pass


def missed(asked: ProbedProcess, *began: float) -> ProbedProcess:
    for each in began:
        asked.note(False, each)
    return asked


@pytest.mark.parametrize(
    ("status", "words"), [(-signal.SIGKILL, "by SIGKILL"), (1, "exit status 1, as it does without an agent")]
)
def test_the_service_ends_with_what_it_cannot_do_without(status: int, words: str) -> None:
    raylet = {"vital": True, "so": "as it does without an agent"}
    assert watch([daemon(status, **raylet)], []).check(0) == f"Ray's raylet has ended ({words})"
    assert watch([daemon(None, **raylet)], []).check(0) is None


def test_of_others_it_is_told_once() -> None:
    told: list[str] = []
    made = watch([daemon(-9, so="its pages are gone")], [], told)
    assert made.check(0) is None
    assert made.check(1) is None
    assert told == ["Ray's raylet has ended (by SIGKILL): its pages are gone"]


def test_who_does_not_answer_hangs_after_a_while() -> None:
    asked = missed(ProbedProcess("Ray's GCS", nothing, 14), 0, 4, 8)
    assert watch([], [asked]).check(13) is None
    assert watch([], [asked]).check(14) == "Ray's GCS has not answered for 14 s"


def test_who_may_only_be_late_has_longer() -> None:
    """On a machine with far more to do than it can, until a signal is found to have stopped it."""
    stopped = [False]
    asked = missed(ProbedProcess("Ray's GCS", nothing, 14, certain=lambda: stopped[0]), 0, 4, 8)
    made = watch([], [asked])
    assert made.check(14 * BUSY - 1) is None
    assert made.check(14 * BUSY) == f"Ray's GCS has not answered for {14 * BUSY} s"
    stopped[0] = True
    assert made.check(14) == "Ray's GCS has not answered for 14 s"


def test_an_answer_makes_up_for_all_before() -> None:
    asked = missed(ProbedProcess("Ray's GCS", nothing, 14), 0, 4, 8)
    asked.note(True, 12)
    assert watch([], [missed(asked, 13, 17)]).check(30) is None


def test_a_question_that_was_late_is_not_enough() -> None:
    """A late question follows a stop of this process itself."""
    asked = missed(ProbedProcess("Ray's GCS", nothing, 14), 0)
    assert MISSES > 1
    assert watch([], [asked]).check(1000) is None


def test_what_can_be_had_again_is_ended_so_often_and_no_more() -> None:
    cured: list[int] = []
    asked = ProbedProcess("Serve's controller", nothing, 10, lambda: cured.append(1))
    made = watch([], [asked])
    for number in range(CURES):
        now = number * 100.0
        missed(asked, now, now + 1, now + 2)
        assert made.check(now + 10) is None
        assert len(cured) == number + 1
        assert made.check(now + 11) is None, "it has time again"
    missed(asked, 900, 901, 902)
    assert made.check(910) == "Serve's controller has not answered for 10 s"
    asked.note(True, 911)
    missed(asked, 1000, 1001, 1002)
    assert made.check(1010) is None
    assert len(cured) == CURES + 1


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def test_an_end_is_heard_of() -> None:
    lost = threading.Event()
    made = ServiceWatchdog(lambda line: None, lost.set)
    with sleeper() as process:
        made.start([ChildProcess("Ray's GCS", process, vital=True)], [], nothing)
        process.kill()
        assert lost.wait(60)
    assert made.why == "Ray's GCS has ended (by SIGKILL)"


@pytest.mark.skipif(sys.platform != "linux", reason="there is no waitid elsewhere")
@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_who_has_ended_is_not_reaped(code: str, status: int) -> None:
    """Ray's workers go on with their streams while there is a process of the raylet's number."""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        wait_for(lambda: ChildProcess("it", process).status() is not None, "its end")
        assert ChildProcess("it", process).status() == status
        assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        assert process.wait() == status
        assert ChildProcess("it", process).status() == status


def test_an_end_that_is_meant_is_not() -> None:
    """A signal to the whole group ends Ray's processes too, a moment earlier maybe."""
    looked = threading.Semaphore(0)
    made = ServiceWatchdog(lambda line: None, lambda: pytest.fail("it was meant"))
    made.start([daemon(-2, vital=True)], [], looked.release)
    assert looked.acquire(timeout=60)
    made.end()
    for thread in threading.enumerate():
        if thread.name == "watch":
            thread.join(60)
    assert made.why is None


def test_one_that_is_asked_is_asked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "PROBE_INTERVAL_S", 0.01)
    answers = [None, OSError("no"), None]
    asked_all = threading.Event()

    def ask() -> None:
        answer = answers.pop(0) if answers else None
        if not answers:
            asked_all.set()
        if answer is not None:
            raise answer

    ended = threading.Event()
    asked = ProbedProcess("the door", ask, 0)
    thread = threading.Thread(target=asked.probe_until, args=(ended,))
    thread.start()
    assert asked_all.wait(60)
    ended.set()
    thread.join(60)
    assert not asked.hangs(1e9)
