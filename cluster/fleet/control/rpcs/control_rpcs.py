"""Handlers of the gRPC service motley.v1.ControlPlane, named after their RPCs."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator
from typing import Any

from .....replicas.errors import InvalidRequest, NotFound, Overloaded, Unavailable
from .....replicas.short_repr import short_repr
from ....api.common.fields.unknown_message_fields import refuse_unknown_fields
from ....one_shot_event import wait_for_first
from ....protos import control_pb2 as pb
from ....routing.explanation.route_log import MAX_ROUTES
from ....transport.caller import Caller
from ....transport.grpc_server.rpc_methods import stream, tells_metrics, unary
from ....transport.slow_clients import SlowClientMonitor
from ..reconciler.fleet_reconciler import FleetReconciler
from ..state import decisions
from ..state.control_state import PolicyPlan
from . import control_messages
from .admin_guard import AdminGuard

log = logging.getLogger(__name__)

MAX_WATCHES = 64
WATCH_S = 10.0  # interval of messages while nothing changes


class ControlRpcs:
    """Handlers of motley.v1.ControlPlane on a control plane."""

    def __init__(self, plane: FleetReconciler, guard: AdminGuard) -> None:
        self.guard = guard
        self.readers = SlowClientMonitor()
        self._plane = plane
        self._watches = 0

    @unary(pb.Fleet)
    async def GetFleet(self, request: pb.GetFleetRequest, caller: Caller) -> pb.Fleet:
        refuse_unknown_fields(request)
        return control_messages.fleet_message(self._observed(), events=True)

    @stream
    def WatchFleet(self, request: pb.WatchFleetRequest, caller: Caller) -> AsyncGenerator[pb.FleetUpdate, None]:
        return self._watch(request)

    @unary(pb.Decision)
    async def ScalePool(self, request: pb.ScalePoolRequest, caller: Caller) -> pb.Decision:
        refuse_unknown_fields(request)
        made = await self._plane.scale(
            request.pool,
            request.replicas,
            by=_by(caller),
            reason=request.reason,
            generation=_generation(request),
            allow_zero=request.allow_zero,
        )
        return control_messages.decision_message(self._plane, made)

    @unary(pb.Decision)
    async def SetScalingPolicy(self, request: pb.SetScalingPolicyRequest, caller: Caller) -> pb.Decision:
        refuse_unknown_fields(request)
        bounds = [(one.pool, one.minimum, one.maximum) for one in request.bounds]
        made = await self._plane.set_policy(
            self._policy(request), bounds, by=_by(caller), reason=request.reason, generation=_generation(request)
        )
        return control_messages.decision_message(self._plane, made)

    @unary(pb.Decision)
    async def DrainReplica(self, request: pb.DrainReplicaRequest, caller: Caller) -> pb.Decision:
        refuse_unknown_fields(request)
        made = await self._plane.drain(
            request.replica_id,
            remove=request.remove,
            by=_by(caller),
            reason=request.reason,
            timeout_s=request.timeout_s if request.HasField("timeout_s") else None,
            generation=_generation(request),
            allow_zero=request.allow_zero,
        )
        return control_messages.decision_message(self._plane, made)

    @unary(pb.Decision)
    async def RollModel(self, request: pb.RollModelRequest, caller: Caller) -> pb.Decision:
        refuse_unknown_fields(request)
        made = await self._plane.roll(
            request.pool,
            request.model,
            secrets.token_hex(8),
            by=_by(caller),
            reason=request.reason,
            generation=_generation(request),
        )
        return control_messages.decision_message(self._plane, made)

    @unary(pb.UpdateWeightsReply)
    async def UpdateWeights(self, request: pb.UpdateWeightsRequest, caller: Caller) -> pb.UpdateWeightsReply:
        refuse_unknown_fields(request)
        pool, results = await self._plane.update_weights(
            request.path,
            delta=request.delta,
            pool=request.pool,
            expected=request.expected_version if request.HasField("expected_version") else None,
            by=_by(caller),
            reason=request.reason,
        )
        return control_messages.weights_message(self._plane, pool, results)

    @unary(pb.Metrics)
    @tells_metrics
    async def GetMetrics(self, request: pb.GetMetricsRequest, caller: Caller) -> pb.Metrics:
        refuse_unknown_fields(request)
        if request.pool:
            decisions.find_pool_plan(self._plane.state, request.pool)
        return control_messages.metrics_message(self._observed(), request.pool)

    @unary(pb.Prefixes)
    async def GetPrefixes(self, request: pb.GetPrefixesRequest, caller: Caller) -> pb.Prefixes:
        refuse_unknown_fields(request)
        return control_messages.prefixes_message(await self._plane.prefixes())

    @unary(pb.FlushPrefixesReply)
    async def FlushPrefixes(self, request: pb.FlushPrefixesRequest, caller: Caller) -> pb.FlushPrefixesReply:
        refuse_unknown_fields(request)
        tenant = request.tenant if request.HasField("tenant") else None
        if tenant == "":
            raise InvalidRequest("tenant: empty is not accepted; leave it out for everyone's", param="tenant")
        flushed = await self._plane.flush(tenant)
        log.info("prefixes of %s flushed by %s", "everyone" if tenant is None else short_repr(tenant), _by(caller))
        return pb.FlushPrefixesReply(replicas=flushed)

    @unary(pb.ExplainedRoutes)
    async def ExplainRoute(self, request: pb.ExplainRouteRequest, caller: Caller) -> pb.ExplainedRoutes:
        refuse_unknown_fields(request)
        if not request.request:
            raise InvalidRequest(
                "request: it is missing; give the server's id of a request, or a client's", param="request"
            )
        found = await self._plane.explain(request.request)
        if not found.matches:
            raise NotFound(
                f"request: no ingress knows {short_repr(request.request)}; each keeps its last {MAX_ROUTES:,}",
                param="request",
                code="request_not_found",
            )
        return control_messages.routes_message(found)

    def _policy(self, request: pb.SetScalingPolicyRequest) -> PolicyPlan | None:
        """Return the policy that a request asks for, or None if it names none.

        Objectives that the request leaves out stay as they are.
        """
        if not request.policy:
            if request.settings or request.HasField("ttft_s") or request.HasField("tpot_s"):
                raise InvalidRequest("policy: say which, beside its objectives and settings", param="policy")
            return None
        now = self._plane.state.policy
        return PolicyPlan(
            request.policy,
            request.ttft_s if request.HasField("ttft_s") else now.ttft_s,
            request.tpot_s if request.HasField("tpot_s") else now.tpot_s,
            dict(request.settings),
        )

    async def _watch(self, request: pb.WatchFleetRequest) -> AsyncGenerator[pb.FleetUpdate, None]:
        refuse_unknown_fields(request)
        if request.after < 0 or request.after > self._plane.state.sequence:
            raise NotFound(
                f"after: there is no event {short_repr(request.after)}; the last is {self._plane.state.sequence}",
                param="after",
                code="event_not_found",
            )
        if self._watches >= MAX_WATCHES:
            raise Overloaded(f"at most {MAX_WATCHES} watches at a time", code="too_many_watches")
        self._watches += 1
        last_sequence = request.after
        try:
            while True:
                changed = self._plane.changed  # taken before reading, so that no later change is missed
                plane = self._observed()
                events = [
                    control_messages.event_message(one) for one in plane.state.events if one.sequence > last_sequence
                ]
                last_sequence = plane.state.sequence
                yield pb.FleetUpdate(fleet=control_messages.fleet_message(plane, events=False), events=events)
                await wait_for_first(changed, timeout_s=WATCH_S)
        finally:
            self._watches -= 1

    def _observed(self) -> FleetReconciler:
        if not self._plane.observed_s:
            raise Unavailable("the state of the fleet is not known yet; try again shortly", code="not_ready")
        return self._plane


def _by(caller: Caller) -> str:
    return f"key of {caller.tenant}"


def _generation(request: Any) -> int | None:
    return request.generation if request.HasField("generation") else None
