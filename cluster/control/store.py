"""Where the state is kept: in Ray's GCS, which outlives the actor."""

from __future__ import annotations

import asyncio

from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from ...replicas.errors import Unavailable
from .state import State, dump, load

_NAMESPACE = b"motley"


class KvStore:
    """Of one application."""

    def __init__(self, app: str) -> None:
        self._key, self._port_key = f"control/{app}".encode(), f"control-port/{app}".encode()

    def kept(self) -> State | None:
        """Raises ValueError for what another version has kept."""
        data = _internal_kv_get(self._key, namespace=_NAMESPACE)
        return None if data is None else load(data)

    def port(self) -> int | None:
        """That the control plane took when it was started first; None: it has not been."""
        data = _internal_kv_get(self._port_key, namespace=_NAMESPACE)
        return None if data is None else int(data)

    def keep_port(self, port: int) -> None:
        _internal_kv_put(self._port_key, str(port).encode(), overwrite=True, namespace=_NAMESPACE)

    async def keep(self, state: State) -> None:
        """Raises Unavailable when Ray's GCS does not take it."""
        try:
            await asyncio.to_thread(_internal_kv_put, self._key, dump(state), overwrite=True, namespace=_NAMESPACE)
        except (RayError, RuntimeError, OSError) as error:
            raise Unavailable("the decision could not be kept, and is not made; try again", code="not_kept") from error


def current_targets(app: str) -> dict[str, int]:
    """How many replicas each pool is to have, for whoever deploys again; empty before the first time."""
    state = KvStore(app).kept()
    return {} if state is None else {name: plan.target for name, plan in state.pools.items()}
