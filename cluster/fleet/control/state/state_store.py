"""Storage of the control plane's state in Ray's GCS, which outlives the actor."""

from __future__ import annotations

import asyncio

from ray.exceptions import RayError

from .....replicas.errors import Unavailable
from ....ray_compat.cluster_state import read_record, write_record
from .control_state import ControlState, decode_state, encode_state


class GcsStateStore:
    """Store of one application's state in Ray's GCS."""

    def __init__(self, app: str) -> None:
        self._key, self._port_key = f"control/{app}".encode(), f"control-port/{app}".encode()

    def load(self) -> ControlState | None:
        """Return the kept state, or None. Raises ValueError for the state of another version of Motley."""
        data = read_record(self._key)
        return None if data is None else decode_state(data)

    def port(self) -> int | None:
        """Return the port that the control plane took at its first start; None if it has not started."""
        data = read_record(self._port_key)
        return None if data is None else int(data)

    def store_port(self, port: int) -> None:
        write_record(self._port_key, str(port).encode())

    async def keep(self, state: ControlState) -> None:
        """Keep the state. Raises Unavailable if Ray's GCS does not take it."""
        try:
            await asyncio.to_thread(write_record, self._key, encode_state(state))
        except (RayError, RuntimeError, OSError) as error:
            raise Unavailable(
                "the decision could not be stored, so it does not apply; try again", code="not_kept"
            ) from error


def current_targets(app: str) -> dict[str, int]:
    """Return how many replicas each pool is to have, for a new deployment; empty before the first one."""
    state = GcsStateStore(app).load()
    return {} if state is None else {name: plan.target for name, plan in state.pools.items()}
