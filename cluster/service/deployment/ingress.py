"""Ingress of the service: every protocol's methods and routes on one class."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from ....replicas.checkpoint.files.model_hub import resolve_model
from ....replicas.host.distribution import motley_version
from ....replicas.model.generation_config import read_generation_config
from ....replicas.text.tokenizer.tokenizer import Tokenizer
from ....replicas.types import NULL_KIND, ReplicaProfile
from ....replicas.updates.weight_file import WeightFile
from ...api.common.admission import RequestAdmitter
from ...api.common.chat.chat_admission import ChatAdmitter
from ...api.common.fields.unknown_fields import UnknownFieldPolicy
from ...api.common.parsers.parser_selection import AUTO, choose_styles
from ...api.health.health_protocol import HealthProtocol
from ...api.health.health_routes import HealthRoutes
from ...api.health.health_rpcs import HealthRpcs
from ...api.kserve.kserve_protocol import KServeProtocol
from ...api.kserve.kserve_rpcs import KServeRpcs
from ...api.kserve.rest.kserve_routes import KServeRoutes
from ...api.metrics_routes import MetricsRoutes
from ...api.motley.motley_protocol import MotleyProtocol
from ...api.motley.motley_rpcs import MotleyRpcs
from ...api.openai.openai_embeddings import EmbeddingsProtocol
from ...api.openai.openai_protocol import OpenAIProtocol
from ...api.openai.openai_routes import OpenAIRoutes
from ...api.openapi_routes import OpenApiRoutes
from ...api.reflection_rpcs import ReflectionRpcs
from ...api.vllm.tokenizer_archive import TokenizerArchive
from ...api.vllm.vllm_protocol import VllmProtocol
from ...api.vllm.vllm_rpcs import VllmRpcs
from ...fleet.deployed.deployed_fleet import DeployedFleet, read_deployed
from ...metrics.metrics_totals import ServiceMetrics
from ...metrics.ray_exporter import RayMetricsExporter
from ...ray_compat.serve_deployments import LateAppDeployment
from ...ray_compat.serve_handles import deployment_handle
from ...routing.explanation.route_explanation import FoundRoutes
from ...routing.fleet_status import FleetStatus, PrefixStatus, WeightStatus
from ...routing.ingress_broadcast import APPLICATION
from ...routing.queueing.request_queue import RoutingConfig
from ...routing.router import Router
from ...tracing.otlp_export import start_otlp_export
from ...transport import access_log
from ...transport.call_spans import trace_calls
from ...transport.http_server import fastapi_app
from ...transport.incoming_bodies import MAX_MESSAGE_BYTES
from ...transport.slow_clients import SlowClientMonitor
from .ingress_config import IngressConfig
from .ray_log_page import log_to_ray_page
from .routing_settings import fleet_routing_config
from .served_profile import load_profile_at_zero, store_served_profile

log = logging.getLogger(__name__)

DEMAND_POLL_S = 1.0  # interval of the checks whether any replica is wanted, while the ingress waits for the first


class Ingress(LateAppDeployment, MotleyRpcs, KServeRpcs, VllmRpcs, HealthRpcs, ReflectionRpcs):
    """Ingress deployment. gRPC methods come from the base classes, which is where Serve looks them up; HTTP from route
    tables.

    It is ready when a replica is, since it asks a replica what it serves. While no replica is wanted, the last one's
    kept profile is used, since a request must be admitted to wake a replica.

    `pools`: handles of the pools by name, when first deployed. `parsers`: names of the parsers of tool calls and
    reasoning.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        model: str,
        pools: dict[str, Any],
        ingress_config: IngressConfig | None = None,
        parsers: tuple[str, str] = (AUTO, AUTO),
    ) -> None:
        self.ingress_config = ingress_config or IngressConfig()
        self.guard = self.ingress_config.guard()
        self.readers = SlowClientMonitor(self.ingress_config.reader_timeout_s)
        log_to_ray_page()
        access_log.write_to(self.ingress_config.log_folder)
        self._handles, routing = pools, self.ingress_config.routing
        deployed = await asyncio.to_thread(_deployed)
        if deployed is not None:  # pools may have come and gone since
            pools = self._of([pool.name for pool in deployed.fleet.pools])
            routing = fleet_routing_config(deployed.fleet)
        self.router = Router(pools, self.ingress_config.resume, routing)
        profile, tokenizer = await asyncio.gather(self._profile(model), asyncio.to_thread(_tokenizer, model))
        defaults = _defaults(model, profile)
        live = self.router.live
        self.admitter = RequestAdmitter(
            profile.model, tokenizer, defaults, self.ingress_config.salt, routing.groups, lambda: live.longest_context
        )
        plain, with_tools = (
            None if template is None else template.source
            for template in (tokenizer.chat_template, tokenizer.tool_template)
        )
        styles = choose_styles(plain, *parsers, with_tools=with_tools)
        log.info("calls of tools: %s; reasoning: %s", styles.tools, styles.reasoning)
        if profile.device == NULL_KIND:
            self.router.disable_message_merging()
        metrics = ServiceMetrics(
            APPLICATION,
            serve.get_replica_context().replica_id.unique_id if ray.is_initialized() else "",
            profile.model.name,
            self.router.stats,
            held=lambda: self.router.held,
            replicas=lambda: live.replicas,
            exporter=RayMetricsExporter() if ray.is_initialized() else None,
        )
        self._flush_traces: Callable[[], None] | None = None
        if self.ingress_config.otlp_endpoint:
            instance = serve.get_replica_context().replica_id.unique_id
            export = start_otlp_export(self.ingress_config.otlp_endpoint, motley_version(), instance)
            self._flush_traces = export.flush
            trace_calls(export.tracer)
            from ...tracing.request_spans import RequestSpans

            self.router.observer = RequestSpans(export, profile.model.name)
        self._metrics_task = asyncio.create_task(metrics.publisher.run())
        chats = ChatAdmitter(self.admitter, styles)
        unknown = UnknownFieldPolicy(self.ingress_config.unknown_fields)
        self.motley = MotleyProtocol(self.admitter, self.router, chats)
        self.kserve = KServeProtocol(self.admitter, self.router, unknown)
        self.vllm = VllmProtocol(self.admitter, self.router, defaults)
        self.tokenizer_archive = TokenizerArchive(resolve_model(model))
        self.health = HealthProtocol(self.router)
        self._routes = (
            *OpenAIRoutes(OpenAIProtocol(self.admitter, self.router, chats, profile.fingerprint, unknown)).routes(),
            *EmbeddingsProtocol(self.admitter, self.router, unknown).routes(),
            *KServeRoutes(self.kserve).routes(),
            *HealthRoutes(self.router).routes(),
            *MetricsRoutes(metrics.totals, vllm_names=self.ingress_config.vllm_metrics).routes(),
            *OpenApiRoutes().routes(),
        )

    async def _profile(self, model: str) -> ReplicaProfile:
        profile_task = asyncio.create_task(self.router.profile())
        try:
            while not profile_task.done():
                await asyncio.wait([profile_task], timeout=DEMAND_POLL_S)
                if (
                    not profile_task.done()
                    and (last := await asyncio.to_thread(load_profile_at_zero, model)) is not None
                ):
                    self.router.live.had_replica = True
                    return last
        finally:
            profile_task.cancel()
        profile = profile_task.result()
        await asyncio.to_thread(store_served_profile, model, profile)
        return profile

    def build_asgi_app(self) -> FastAPI:
        return fastapi_app.build_fastapi_app(
            self._routes,
            self.guard,
            max_body_bytes=MAX_MESSAGE_BYTES,
            cors_origins=self.ingress_config.cors_origins,
            echo_id=self.ingress_config.echo_id,
            readers=self.readers,
        )

    async def use_pools(self, names: list[str], routing: RoutingConfig | None = None) -> None:
        """Use these pools of the same application from now on. A changed fleet is applied through this."""
        self.router.replace_pools(self._of(names))
        if routing is not None:
            self.router.replace_routing(routing)
            self.admitter.groups = routing.groups

    def _of(self, names: list[str]) -> dict[str, Any]:
        for name in names:
            if name not in self._handles:
                self._handles[name] = deployment_handle(name, APPLICATION)
        return {name: self._handles[name] for name in names}

    async def drain(self) -> int:
        """Refuse new requests from now on; return how many streams are left. Called when the service stops."""
        self.router.drain()
        return self.router.num_streams

    async def flush_traces(self) -> None:
        """Send a collector what it has not been sent yet, if there is one. Called when the drain is over."""
        if self._flush_traces is not None:
            await asyncio.to_thread(self._flush_traces)

    async def fleet(self, failing: str = "") -> FleetStatus:
        """Return the replicas as this ingress sees them, and statistics of its requests. For the control plane.

        failing  why wanted replicas do not start; empty: they do, or none is wanted
        """
        self.router.failing = failing
        return replace(self.router.fleet(), ingress=serve.get_replica_context().replica_id.unique_id)

    async def drain_replica(self, replica_id: str) -> bool:
        """Let that replica take no new requests, from any ingress. False: there is none. Raises Unavailable."""
        return await self.router.drain_replica(replica_id)

    async def flush_prefixes(self, tenant: str | None) -> int:
        """Drop the cached prefixes of one tenant, or of all, on every replica; return how many there are. Raises
        Unavailable.
        """
        return await self.router.flush(tenant)

    async def update_weights(self, pool: str, file: WeightFile, version: int) -> tuple[WeightStatus, ...]:
        """Load that version of the weights on every replica of the pool. For the control plane. Raises Unavailable."""
        return await self.router.update_weights(pool, file, version)

    async def prefixes(self) -> tuple[PrefixStatus, ...]:
        """Return the replicas' prefix cache statistics. For the control plane. Raises Unavailable."""
        return await self.router.prefixes()

    async def explain_route(self, request: str) -> FoundRoutes:
        """Return where this ingress's latest requests of that id went, and why. For the control plane."""
        return self.router.explain(request, serve.get_replica_context().replica_id.unique_id)

    async def end_streams(self) -> None:
        """End the streams that are left with an error, since the drain is over."""
        self.router.end_streams()


def _deployed() -> DeployedFleet | None:
    return read_deployed() if ray.is_initialized() else None


def _tokenizer(model: str) -> Tokenizer:
    return Tokenizer.load(resolve_model(model))


def _defaults(model: str, profile: ReplicaProfile) -> dict[str, Any]:
    """Return the sampling defaults of the checkpoint's generation_config.json."""
    info = profile.model
    return read_generation_config(resolve_model(model), info.vocab_size, info.eos_token_ids).sampling()
