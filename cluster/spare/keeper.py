"""A node with a replica keeps processes that wait for the next one: a replica that starts there again has imported all.

Ray's raylet starts a worker ahead of its use when it is asked (`PrestartWorkers`, which Ray has for its own), gives it
to the next actor of the same job and environment, and ends it with the rest of the node.
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

SETTLE_S = 10.0  # from a replica that is ready to the first look: it has the cores to itself until then
LOOK_S = 5.0  # between two
LONGEST_S = 600.0  # likewise, where processes do not stay
STEADY_S = 60.0  # who is there for so long has stayed
ROOM_BYTES = 2 << 30  # of the host's memory: a replica and its streams come first
_ASK_S = 10.0
_STAY_S = 10**6  # longer than a raylet lets anybody wait by itself


def keep(count: int) -> None:
    """From now on, while this process lives, have so many wait on this node. Where Ray does not let them: none."""
    if PRELOADED not in sys.modules:
        log.debug("no process waits for the next replica: Ray was started without RAY_preload_python_modules")
        return
    keeper = Keeper(places(), count, ask)
    threading.Thread(target=keeper.run, name="keeps spares", daemon=True).start()


@dataclass(slots=True)
class Keeper:
    """places: of this node. count: how many are to wait. ask: starts so many processes."""

    places: Places
    count: int
    ask: Callable[[int], None]
    room: Callable[[], int] = available_memory
    _wait_s: float = LOOK_S
    _asked: float = float("-inf")

    def run(self) -> None:
        time.sleep(SETTLE_S)
        while self.look(time.monotonic()):
            time.sleep(LOOK_S)

    def look(self, now: float) -> bool:
        """Ask for those that are not there, with longer and longer waits where they do not stay. False: in vain."""
        try:
            with self.places.alone():
                missing = self.count - self.places.count()
                if missing <= 0:
                    if now - self._asked > STEADY_S:
                        self._wait_s = LOOK_S
                elif now - self._asked >= self._wait_s and self.room() >= ROOM_BYTES:
                    self._asked, self._wait_s = now, min(2 * self._wait_s, LONGEST_S)
                    self.places.add(missing)
                    self.ask(missing)
        except Exception as error:  # noqa: BLE001  # Ray's and gRPC's have nothing in common, and none is a replica's
            log.warning("no process waits for the next replica of this node: %s", " ".join(str(error).split())[:200])
            return False
        return True


def ask(count: int) -> None:
    """Have the node's raylet start worker processes for this process's job, which nobody has yet."""
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
        job_id=bytes.fromhex(context.get_job_id()),
        runtime_env_info=RuntimeEnvInfo(serialized_runtime_env=context.get_runtime_env_string()),
        keep_alive_duration_secs=_STAY_S,
        num_workers=count,
    )
    with init_grpc_channel(build_address(node["NodeManagerAddress"], node["NodeManagerPort"])) as channel:
        node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=_ASK_S)
