"""A node with a replica keeps processes that wait for the next one: a replica that starts there again has imported all.

Ray's raylet starts a worker ahead of its use when it is asked (`PrestartWorkers`, which Ray has for its own), gives it
to the next actor of the same environment, and ends it with the rest of the node.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...replicas.host_memory import available_memory
from .places import Places
from .process import PRELOADED, places

__all__ = ["Keeper", "keep"]

log = logging.getLogger(__name__)

SETTLE_S = 10.0  # so long someone has to be missing: who has just been taken, has the cores to load with
LOOK_S = 2.0  # between two looks
FIRST_S, LONGEST_S = 5.0, 3600.0  # between two that are asked for, where they do not stay
STEADY_S = 60.0  # who is there for so long has stayed
TOLD = 8  # asked for so often in a row
ROOM_BYTES = 2 << 30  # of the host's memory: a replica and its streams come first
_ASK_S = 10.0
_STAY_S = 10**6  # longer than a raylet lets anybody wait by itself


def keep(count: int, after_s: float = 0.0) -> None:
    """From now on, while this process lives, have so many wait on this node.

    None where Ray was started without our settings, and where there is no /proc to tell who waits.
    """
    if PRELOADED not in sys.modules or sys.platform != "linux":
        return
    keeper = Keeper(places(), count, ask)
    threading.Thread(target=keeper.run, args=(after_s,), name="keeps spares", daemon=True).start()


@dataclass(slots=True)
class Keeper:
    """places: of this node. count: how many are to wait. ask: starts so many processes."""

    places: Places
    count: int
    ask: Callable[[int], None]
    room: Callable[[], int] = available_memory
    _missing: float | None = None  # since when
    _full: float | None = None

    def run(self, after_s: float) -> None:
        time.sleep(after_s)
        while self.look(time.monotonic()):
            time.sleep(LOOK_S)

    def look(self, now: float) -> bool:
        """Ask for those that are not there, with longer and longer waits where they do not stay. False: never again."""
        try:
            with self.places.alone():
                self._look(now)
        except (ImportError, AttributeError, NotImplementedError) as error:
            log.warning("no process waits for the next replica of this node: this Ray has no way to: %s", error)
            return False
        except Exception as error:  # noqa: BLE001  Ray's, gRPC's and the disk's pass, and none is a replica's
            log.debug("a process that is to wait for the next replica was not asked for: %s", error)
        return True

    def _look(self, now: float) -> None:
        missing = self.count - self.places.count()
        if missing <= 0:
            self._missing, self._full = None, now if self._full is None else self._full
            if now - self._full > STEADY_S:
                self.places.note_steady()
            return
        self._full, self._missing = None, now if self._missing is None else self._missing
        often, ago_s = self.places.asked
        wait_s = min(FIRST_S * 2**often, LONGEST_S)
        if now - self._missing < SETTLE_S or ago_s < wait_s or self.room() < ROOM_BYTES:
            return
        if often == TOLD:
            log.warning("processes that are to wait for the next replica of this node do not stay: %d came", often)
        self.places.note_asked()
        wanted = self.places.add(missing)
        try:
            self.ask(missing)
        except BaseException:
            for place in wanted:
                place.unlink(missing_ok=True)
            raise


def ask(count: int) -> None:
    """Have the node's raylet start worker processes that nobody has yet. Raises NotImplementedError where it cannot.

    They are of no job: those of one end with its driver, which of a fleet on somebody else's cluster has long ended.
    """
    import grpc
    import ray
    from ray._common.network_utils import build_address
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc
    from ray.core.generated.common_pb2 import PYTHON
    from ray.core.generated.runtime_environment_pb2 import RuntimeEnvInfo

    context = ray.get_runtime_context()
    here = context.get_node_id()
    (node,) = (node for node in ray.nodes() if node["NodeID"] == here)
    request = node_manager_pb2.PrestartWorkersRequest(
        language=PYTHON,
        runtime_env_info=RuntimeEnvInfo(serialized_runtime_env=context.get_runtime_env_string()),
        keep_alive_duration_secs=_STAY_S,
        num_workers=count,
    )
    with init_grpc_channel(build_address(node["NodeManagerAddress"], node["NodeManagerPort"])) as channel:
        try:
            node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=_ASK_S)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                raise NotImplementedError(error.details()) from error
            raise
