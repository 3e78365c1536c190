"""KEDA's externalscaler.ExternalScaler: lets Kubernetes run as many pods as a pool wants, or as its queue asks for."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from .....replicas.errors import InvalidRequest, Overloaded, Unavailable
from .....replicas.short_repr import short_repr
from ....one_shot_event import wait_for_first
from ....protos import control_pb2, externalscaler_pb2
from ....protos import externalscaler_pb2 as pb
from ....transport.caller import Caller
from ....transport.grpc_server.rpc_methods import stream, tells_metrics, unary
from ....transport.slow_clients import SlowClientMonitor
from ..backend.fleet_backend import PoolSnapshot
from ..reconciler.fleet_reconciler import FleetReconciler
from ..state import decisions
from . import control_messages
from .admin_guard import AdminGuard

# Metadata entries with the caller's key. KEDA looks up the variable that `keyFromEnv` names in the environment of the
# pods' container, and sends its value under the entry's whole name.
KEYS = ("keyFromEnv", "key")
MIN_TARGET, MAX_TARGET = 0.001, 1e9  # Kubernetes' own resolution, and more than any queue holds
_NUMBER = re.compile(r"\d{1,19}(\.\d{0,19})?([eE][+-]?\d{1,3})?", re.ASCII)  # without what only Python accepts
MAX_STREAMS = 512  # maximum open streams, of which each ScaledObject has two


def _replica_value(one: control_pb2.PoolMetrics, num_held: int) -> float:
    return one.target


def _queue_value(one: control_pb2.PoolMetrics, num_held: int) -> float:
    return one.waiting + num_held


def _token_value(one: control_pb2.PoolMetrics, num_held: int) -> float:
    return one.queued_prefill_tokens


METRICS: Mapping[str, Callable[[control_pb2.PoolMetrics, int], float]] = {
    "replicas": _replica_value,
    "queue": _queue_value,
    "tokens": _token_value,
}


@dataclass(frozen=True, slots=True)
class ScalerTrigger:
    """Parsed trigger of a ScaledObject: the pool, the metric, and the metric's target per pod."""

    pool: str
    metric: str
    target: float

    @property
    def name(self) -> str:
        return f"motley-{self.pool}-{self.metric}"


def parse_trigger(metadata: Mapping[str, str]) -> ScalerTrigger:
    """Parse a trigger's metadata. Raises InvalidRequest naming the entry; entries that are not ours are KEDA's own."""
    metric, target = metadata.get("metric", "replicas"), metadata.get("target", "1")
    if metric not in METRICS:
        raise _metadata_error("metric", metric, f"one of {', '.join(METRICS)}")
    size = float(target) if _NUMBER.fullmatch(target) else math.nan
    if not MIN_TARGET <= size <= MAX_TARGET:
        raise _metadata_error("target", target, f"a number from {MIN_TARGET:g} to {MAX_TARGET:g}")
    return ScalerTrigger(metadata.get("pool", ""), metric, size)


class KedaRpcs:
    """Handlers of externalscaler.ExternalScaler on a control plane.

    The guard lets calls without headers pass, since KEDA sends none; their key is in the request.
    """

    def __init__(self, plane: FleetReconciler, guard: AdminGuard) -> None:
        self.guard = guard
        self.readers = SlowClientMonitor()
        self._plane = plane
        self._streams = 0

    @unary(pb.IsActiveResponse)
    @tells_metrics
    async def IsActive(self, request: externalscaler_pb2.ScaledObjectRef, caller: Caller) -> pb.IsActiveResponse:
        return self._active(self._trigger(request, caller))

    @stream
    @tells_metrics
    def StreamIsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, caller: Caller
    ) -> AsyncGenerator[pb.IsActiveResponse, None]:
        return self._stream(request, caller)

    @unary(pb.GetMetricSpecResponse)
    @tells_metrics
    async def GetMetricSpec(
        self, request: externalscaler_pb2.ScaledObjectRef, caller: Caller
    ) -> pb.GetMetricSpecResponse:
        return _metric_spec(self._trigger(request, caller))

    @stream
    @tells_metrics
    def StreamMetricSpec(
        self, request: externalscaler_pb2.ScaledObjectRef, caller: Caller
    ) -> AsyncGenerator[pb.GetMetricSpecResponse, None]:
        return self._specs(request, caller)

    @unary(pb.GetMetricsResponse)
    @tells_metrics
    async def GetMetrics(self, request: externalscaler_pb2.GetMetricsRequest, caller: Caller) -> pb.GetMetricsResponse:
        trigger = self._trigger(request.scaledObjectRef, caller)
        if request.metricName not in (trigger.name, ""):
            raise _metadata_error("metricName", request.metricName, trigger.name)
        value = self._value(trigger)
        found = pb.MetricValue(metricName=trigger.name, metricValue=math.ceil(value), metricValueFloat=value)
        return pb.GetMetricsResponse(metricValues=[found])

    def _trigger(self, ref: externalscaler_pb2.ScaledObjectRef, caller: Caller) -> ScalerTrigger:
        if not caller.tenant:
            self.guard.reader_with({ref.scalerMetadata[name].strip() for name in KEYS if name in ref.scalerMetadata})
        trigger = parse_trigger(ref.scalerMetadata)
        decisions.find_pool_plan(self._plane.state, trigger.pool)
        return trigger

    def _value(self, trigger: ScalerTrigger) -> float:
        if not self._plane.observed_s:
            raise Unavailable("the state of the fleet is not known yet; try again shortly", code="not_ready")
        if not self._is_available(trigger):
            raise Unavailable("no ingress reports how many requests wait and run; try again shortly", code="no_ingress")
        [one] = control_messages.metrics_message(self._plane, trigger.pool).pools
        value = float(METRICS[trigger.metric](one, self._num_held()))
        return max(value, trigger.target * self._num_nodes_to_keep(trigger.pool))

    def _num_nodes_to_keep(self, pool: str) -> int:
        """Return on how many nodes a pool has replicas while one of them loads its model; 0 while none does.

        Kubernetes removes the newest pods first: if it removed any, it would be the one whose replica loads.
        """
        snapshot = self._plane.snapshots.get(pool, PoolSnapshot(0))
        placed = [one for one in snapshot.replicas if one.node and one.state != "stopping"]
        loads = any(one.state == "starting" for one in placed)
        return len({one.node for one in placed}) if loads else 0

    def _is_available(self, trigger: ScalerTrigger) -> bool:
        """Return whether the metric's value is known.

        Only an ingress knows what waits, and its silence does not mean zero.
        """
        return trigger.metric == "replicas" or self._plane.status is not None

    def _num_held(self) -> int:
        return 0 if self._plane.status is None else self._plane.status.demand.held

    def _active(self, trigger: ScalerTrigger) -> pb.IsActiveResponse:
        """Return whether a trigger is active.

        A queue also is while replicas compute, so that no working pod is removed.
        """
        busy = (
            trigger.metric != "replicas"
            and control_messages.metrics_message(self._plane, trigger.pool).pools[0].running > 0
        )
        return pb.IsActiveResponse(result=self._value(trigger) > 0 or busy)

    async def _stream(
        self, request: externalscaler_pb2.ScaledObjectRef, caller: Caller
    ) -> AsyncGenerator[pb.IsActiveResponse, None]:
        trigger = self._trigger(request, caller)
        last = None
        with self._counted():
            while True:
                changed = self._plane.changed
                if not self._plane.observed_s or self._is_available(trigger):
                    active = self._active(trigger)
                    if active != last:
                        yield active
                    last = active
                await wait_for_first(changed)

    async def _specs(
        self, request: externalscaler_pb2.ScaledObjectRef, caller: Caller
    ) -> AsyncGenerator[pb.GetMetricSpecResponse, None]:
        trigger = self._trigger(request, caller)
        with self._counted():
            yield _metric_spec(trigger)
            await asyncio.get_running_loop().create_future()  # keep the stream open: the specification never changes

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self._streams >= MAX_STREAMS:
            raise Overloaded(f"at most {MAX_STREAMS} watches at a time", code="too_many_watches")
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1


def _metric_spec(trigger: ScalerTrigger) -> pb.GetMetricSpecResponse:
    spec = pb.MetricSpec(metricName=trigger.name, targetSize=math.ceil(trigger.target), targetSizeFloat=trigger.target)
    return pb.GetMetricSpecResponse(metricSpecs=[spec])


def _metadata_error(name: str, value: str, expected: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name}: {short_repr(value)} is not accepted; expected {expected}", param=name, code="invalid_value"
    )
