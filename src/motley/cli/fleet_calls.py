"""Connection of `motley fleet` to a control plane: by address and key, or to the service on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from ..cluster.fleet.control.control_contact import ControlContact, find_contacts
from ..cluster.protos import control_pb2 as pb
from ..cluster.protos import control_pb2_grpc
from ..replicas.errors import MotleyError

RECONNECT_S = 0.5


def resolve_contact(address: str | None, key: str, ca: Path | None) -> ControlContact:
    """Return the address and key of the control plane. Raises MotleyError if it is unclear which one, or which key."""
    here = find_contacts()
    if address is not None:
        here = [one for one in here if one.address == address] or [ControlContact(address, "", tls=ca is not None)]
    if len(here) != 1:
        there = ", ".join(one.address for one in here)
        raise MotleyError(
            f"there are several services on this machine; choose one with --address: {there}"
            if here
            else "no service with a control plane runs on this machine; give --address and --admin-key"
        )
    contact = replace(here[0], key=key or here[0].key, tls=here[0].tls or ca is not None)
    if not contact.key:
        raise MotleyError(f"{contact.address}: give an admin's key, with --admin-key FILE or $MOTLEY_ADMIN_KEY")
    return contact


class ControlPlaneClient:
    """gRPC client of motley.v1.ControlPlane, which adds the admin's key and a default timeout to every call."""

    def __init__(self, contact: ControlContact, ca: Path | None, timeout_s: float) -> None:
        if contact.tls:
            roots = None if ca is None else ca.read_bytes()
            self._channel = grpc.secure_channel(contact.address, grpc.ssl_channel_credentials(roots))
        else:
            self._channel = grpc.insecure_channel(contact.address)
        self._stub = control_pb2_grpc.ControlPlaneStub(self._channel)
        self._metadata = (("authorization", f"Bearer {contact.key}"),)
        self._timeout_s = timeout_s

    def __enter__(self) -> ControlPlaneClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stub, name)

        def call(request: Any, **options: Any) -> Any:
            return method(request, metadata=self._metadata, **{"timeout": self._timeout_s, **options})

        return call

    def updates(self, after: int = 0) -> Iterator[pb.FleetUpdate]:
        """Yield updates without end. After a broken call it waits and calls again; no event is missed or repeated."""
        since = None
        while True:
            try:
                for update in self.WatchFleet(pb.WatchFleetRequest(after=after), timeout=None):
                    since = None
                    after = max((event.sequence for event in update.events), default=after)
                    yield update
            except grpc.RpcError as error:
                now = time.monotonic()
                since = since or now
                if error.code() != grpc.StatusCode.UNAVAILABLE or now - since > self._timeout_s:
                    raise
                time.sleep(RECONNECT_S)
