"""Environment variables that gRPC reads when it starts, in Motley's processes that call others."""

from __future__ import annotations

from collections.abc import Mapping

EXPERIMENTS = "GRPC_EXPERIMENTS"
# A caller waits at its sockets itself, as older grpcio did; else a thread of an event engine does, and wakes
# that one for each message: 50 us of CPU for a streamed message that is read, against 32 (grpcio 1.85).
OWN_POLLER = "-event_engine_client"


def grpc_experiments(environ: Mapping[str, str]) -> str:
    """Return the value for GRPC_EXPERIMENTS: what it holds already, and OWN_POLLER unless it names that."""
    given = environ.get(EXPERIMENTS, "")
    named = {one.strip().lstrip("-") for one in given.split(",")}
    return given if OWN_POLLER.lstrip("-") in named else ",".join(filter(None, (given, OWN_POLLER)))
