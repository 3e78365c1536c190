"""Watch of `motley serve` over the processes that it started, and those that must answer.

A process without which nothing is served ends the service, with a reason and exit status `EXIT_SERVICE_LOST`, so that
a service manager can restart it. One that can be replaced while streams go on is ended, so that Ray or Serve restarts
it. The end of a process is noticed at once; one that hangs is recognised by several questions in a row that it does not
answer.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

EXIT_SERVICE_LOST = 75  # exit status (EX_TEMPFAIL): a part has ended that only a new start brings back
WAKE_S = 1.0  # a signal that another thread got is seen when the main one wakes
PROBE_INTERVAL_S = 1.5  # between an answer and the next probe
MISSES = 3  # questions in a row without an answer: one that was only late, as after a stop of this process, is not lost
CURES = 3  # in a row that help nothing
BUSY = 6  # times as long for what may only be late, as on a machine with far more to do than it can
MEANT_S = 0.5  # in which a signal to end arrives, of which the same signal to others has been seen already

log = logging.getLogger(__name__)


class ServiceLost(Exception):
    """Error that ends the service, with the reason."""


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """A child process.

    vital      whether nothing is served without it
    so     what no longer works without it; for a vital one, why it may have ended by itself
    """

    name: str
    process: subprocess.Popen[bytes]
    vital: bool = False
    so: str = ""

    def status(self) -> int | None:
        """Return the exit status as `Popen.poll` does, but leave the process a zombie, so that Ray's workers keep their
        streams.

        Ray's workers check whether the raylet's process id exists, which a zombie's does. They end when it is reaped,
        or when the GCS misses it.
        """
        if sys.platform != "linux":
            return self.process.poll()
        try:
            found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # it has been reaped
            return self.process.poll()
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


@dataclass(slots=True)
class ProbedProcess:
    """A process that is probed repeatedly.

    probe      returns in time, or raises any error
    timeout_s  seconds without an answer after which it counts as hung
    certain    whether silence is proof, as when a signal has stopped it; otherwise it has BUSY times as long
    cure       ends it, so that its starter restarts it; None: nobody does, and the service ends
    vital      whether the service ends as well if that does not help
    """

    name: str
    probe: Callable[[], object]
    timeout_s: float
    cure: Callable[[], None] | None = None
    vital: bool = True
    certain: Callable[[], bool] = lambda: True
    _misses: int = 0
    _silent_since: float = 0.0
    _cures: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def note(self, answered: bool, began: float) -> None:
        """Note an answer, or a missing one. began: when the probe was sent."""
        with self._lock:
            if answered:
                self._misses = self._cures = 0
                return
            self._silent_since = began if self._misses == 0 else self._silent_since
            self._misses += 1

    def hangs(self, now: float) -> bool:
        silent_s = now - self._silent_since
        if self._misses < MISSES or silent_s < self.timeout_s:
            return False
        return silent_s >= BUSY * self.timeout_s or self.certain()

    def judge(self, now: float) -> str | None:
        """Return why the service has to end, or None. Cures the process if it hangs and can be replaced."""
        if not self.hangs(now):
            return None
        if self.cure is None or (self.vital and self._cures >= CURES):
            return f"{self.name} has not answered for {now - self._silent_since:.0f} s"
        with self._lock:
            self._misses, self._cures = 0, self._cures + 1
        log.warning("%s has not answered for %.0f s, and is started again", self.name, now - self._silent_since)
        self.cure()
        return None

    def probe_until(self, ended: threading.Event) -> None:
        while not ended.wait(PROBE_INTERVAL_S):
            began = time.monotonic()
            try:
                self.probe()
            except Exception as error:  # noqa: BLE001  there is no answer, for whatever reason
                log.debug("%s does not answer: %r", self.name, error)
                self.note(False, began)
            else:
                self.note(True, began)


class ServiceWatchdog:
    """Watch that runs in a thread of its own from `start` to `end`. why: reason for which the service must end, or
    None.

    report: prints a line for the user. lost: is called once `why` is set.
    """

    def __init__(self, report: Callable[[str], None], lost: Callable[[], None]) -> None:
        self.why: str | None = None
        self._report, self._lost = report, lost
        self._daemons: list[ChildProcess] = []
        self._probed: list[ProbedProcess] = []
        self._checks: list[Callable[[], None]] = []
        self._ended = threading.Event()

    def start(
        self, daemons: Sequence[ChildProcess], probed: Sequence[ProbedProcess], check: Callable[[], None]
    ) -> None:
        """Start the watch. check: is called about once a second."""
        self._daemons += daemons
        self._checks.append(check)
        self.also(probed)
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def also(self, probed: Sequence[ProbedProcess]) -> None:
        """Watch these processes too, from now on."""
        self._probed += probed
        for one in probed:
            threading.Thread(
                target=one.probe_until, args=(self._ended,), name=f"probes {one.name}", daemon=True
            ).start()

    def end(self) -> None:
        """End the watch: processes that end from now on are meant to."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            why = self.check(time.monotonic())
            # A signal to the whole group, as a terminal sends it, ends Ray's processes too: this one ends as asked.
            if why is not None and not self._ended.wait(MEANT_S):
                self.why = why
                self._lost()
                return
            _wait_for_one(self._daemons)

    def check(self, now: float) -> str | None:
        """Return why the service has to end, or None."""
        for check in self._checks:
            check()
        for daemon in [*self._daemons]:
            status = daemon.status()
            if status is None:
                continue
            if daemon.vital:
                by_itself = f", {daemon.so}" if status >= 0 and daemon.so else ""
                return f"{daemon.name} has ended ({_describe_status(status)}{by_itself})"
            self._daemons.remove(daemon)
            self._report(f"{daemon.name} has ended ({_describe_status(status)}): {daemon.so}")
        return next((why for probed in [*self._probed] if (why := probed.judge(now)) is not None), None)


def _wait_for_one(daemons: Sequence[ChildProcess]) -> None:
    """Return when one of the processes has ended, or after a second."""
    if sys.platform != "linux":
        time.sleep(WAKE_S)
        return
    opened: list[int] = []
    try:
        poll = select.poll()
        for daemon in daemons:
            with suppress(OSError):  # a kernel before 5.3, or it has just been reaped
                opened.append(os.pidfd_open(daemon.process.pid))
                poll.register(opened[-1], select.POLLIN)
        poll.poll(WAKE_S * 1e3)
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _describe_status(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
