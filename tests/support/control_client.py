"""A fleet's control plane, asked again while its actor is away."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import grpc
from serve_process import wait_for

from motley.cluster.fleet.control.control_contact import ControlContact
from motley.cluster.protos import control_pb2 as pb
from motley.cluster.protos import control_pb2_grpc


class Plane:
    def __init__(self, contact: ControlContact) -> None:
        self.channel = grpc.insecure_channel(contact.address)
        self.metadata = (("authorization", f"Bearer {contact.key}"),)
        self._stub = control_pb2_grpc.ControlPlaneStub(self.channel)

    def call(self, name: str, request: Any) -> Any:
        """Again while the actor is away: a decision that was made already is not made twice."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return getattr(self._stub, name)(request, metadata=self.metadata, timeout=60, wait_for_ready=True)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    @property
    def fleet(self) -> pb.Fleet:
        return self.call("GetFleet", pb.GetFleetRequest())

    def pool_of(self, name: str) -> pb.Pool:
        [pool] = [pool for pool in self.fleet.pools if pool.name == name]
        return pool

    def scale(self, replicas: int, pool: str, **more: Any) -> pb.Decision:
        request = pb.ScalePoolRequest(pool=pool, replicas=replicas, reason=f"to {replicas}", allow_zero=True, **more)
        made: pb.Decision = self.call("ScalePool", request)
        return made

    def policy(self, name: str, **settings: float) -> None:
        self.call("SetScalingPolicy", pb.SetScalingPolicyRequest(policy=name, settings=settings, reason=name))

    def watch(self, after: int) -> Any:
        return self._stub.WatchFleet(pb.WatchFleetRequest(after=after), metadata=self.metadata, timeout=60)

    def wait(self, replicas: int, name: str) -> None:
        def there() -> bool:
            pool = self.pool_of(name)
            return pool.ready == replicas == len(pool.replicas) and not pool.draining and not pool.rolling

        wait_for(there, f"{replicas} replicas of {name}", 180)

    def kinds(self, after: int) -> Counter[str]:
        return Counter(pb.EventKind.Name(one.kind) for one in self.fleet.events if one.sequence > after)
