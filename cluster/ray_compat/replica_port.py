"""Port at which a replica is called by other replicas. Imports Serve's own module, in which a name is replaced: import
this in the replica's process, and not before.
"""

from __future__ import annotations

from typing import Any

from ray._common.tls_utils import add_port_to_grpc_server
from ray.serve._private import replica


def bind_replica_port(host: str) -> None:
    """Make Serve bind the port of the replica in this process at this address alone."""

    def bind(server: Any, address: str) -> Any:
        return add_port_to_grpc_server(server, f"{host}:{address.rpartition(':')[2]}")

    replica.add_port_to_grpc_server = bind
