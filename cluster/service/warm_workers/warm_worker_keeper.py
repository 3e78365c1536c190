"""Keeper of warm worker processes on a node with a replica: a replica that starts there finds everything imported.

Ray's raylet starts a worker ahead of its use on request (`PrestartWorkers`, an internal call of Ray), gives it to the
next actor with the same environment, and ends it with the rest of the node.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ....replicas.host.host_memory import available_memory
from ...ray_compat.local_node import prestart_workers
from .warm_worker import PRELOADED, node_slots
from .warm_worker_slots import WarmWorkerSlots

log = logging.getLogger(__name__)

SETTLE_S = 10.0  # delay before a missing process is replaced, so that a new replica has the cores while it loads
POLL_INTERVAL_S = 2.0  # interval of the checks
FIRST_S, LONGEST_S = 5.0, 3600.0  # bounds of the pause between requests for processes, if these do not stay
STEADY_S = 60.0  # a process that is there for this long counts as stable
WARN_AFTER_REQUESTS = 8  # unsuccessful requests in a row after which a warning is logged
MIN_FREE_BYTES = 2 << 30  # free host memory below which none is started, since replicas and their streams come first
_STAY_S = 10**6  # keep-alive of a waiting worker, much longer than a raylet's default


def keep_warm_workers(count: int, after_s: float = 0.0) -> None:
    """Keep `count` processes waiting on this node while this process lives, starting after `after_s` seconds.

    Does nothing where Ray was started without our settings, or where there is no /proc to see which processes wait.
    """
    if PRELOADED not in sys.modules or sys.platform != "linux":
        return
    keeper = WarmWorkerKeeper(node_slots(), count, partial(prestart_workers, keep_s=_STAY_S))
    threading.Thread(target=keeper.run, args=(after_s,), name="keeps warm workers", daemon=True).start()


@dataclass(slots=True)
class WarmWorkerKeeper:
    """Keeper of a node's waiting processes.

    places         records of the node's waiting processes
    count          number of processes that should wait processes
    start_workers  starts that many processes
    free_memory    returns the free host memory in bytes
    """

    places: WarmWorkerSlots
    count: int
    start_workers: Callable[[int], None]
    free_memory: Callable[[], int] = available_memory
    _missing: float | None = None  # since when too few processes wait
    _full: float | None = None

    def run(self, after_s: float) -> None:
        time.sleep(after_s)
        while self.check(time.monotonic()):
            time.sleep(POLL_INTERVAL_S)

    def check(self, now: float) -> bool:
        """Request missing processes, with ever longer pauses if they do not stay.

        Return False if that is impossible here.
        """
        try:
            with self.places.alone():
                self._start_missing(now)
        except (ImportError, AttributeError, NotImplementedError) as error:
            log.warning("no process waits for the next replica of this node: this Ray has no way to: %s", error)
            return False
        except Exception as error:  # noqa: BLE001  errors of Ray, gRPC and the disk pass; none may end the replica
            log.debug("a process that is to wait for the next replica was not asked for: %s", error)
        return True

    def _start_missing(self, now: float) -> None:
        missing = self.count - self.places.count()
        if missing <= 0:
            self._missing, self._full = None, now if self._full is None else self._full
            if now - self._full > STEADY_S:
                self.places.note_steady()
            return
        self._full, self._missing = None, now if self._missing is None else self._missing
        often, ago_s = self.places.requests
        wait_s = min(FIRST_S * 2**often, LONGEST_S)
        if now - self._missing < SETTLE_S or ago_s < wait_s or self.free_memory() < MIN_FREE_BYTES:
            return
        if often == WARN_AFTER_REQUESTS:
            log.warning("processes that are to wait for the next replica of this node do not stay: %d came", often)
        self.places.note_request()
        requested = self.places.add(missing)
        try:
            self.start_workers(missing)
        except BaseException:
            for place in requested:
                place.unlink(missing_ok=True)
            raise
