"""Fleet of Ray Serve: the controller, the ingress and the nodes of a cluster.

Targets are set by the call behind Serve's own REST API for external scalers. From a process of the cluster that is one
step less, and needs neither the dashboard's address nor its token.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import DeploymentDetails, ReplicaDetails

from .....replicas.checkpoint.files.model_hub import resolve_model
from .....replicas.errors import InvalidRequest, MotleyError, Unavailable
from .....replicas.loading.servable_check import check_servable_in_child
from .....replicas.updates.weight_file import WeightFile
from ....ray_compat.cluster_state import labels_match
from ....ray_compat.serve_controller import (
    DeployedSettings,
    deployment_names,
    fetch_deployment_details,
    fetch_deployment_ids,
    fetch_deployment_settings,
    find_controller,
    find_replica_actor,
    read_settings,
    set_number_of_replicas,
)
from ....ray_compat.serve_deployments import DeploymentChange, redeploy_application
from ....ray_compat.visible_names import FAILED_START
from ....routing.explanation.route_explanation import FoundRoutes, join_routes
from ....routing.fleet_status import FleetStatus, FleetStatusMerger, PrefixStatus, WeightStatus
from ....routing.ingress_broadcast import INGRESS, call_every_ingress
from ...deployed.deployed_fleet import read_deployed
from ...spec.fleet_spec import FleetSpec
from .fleet_backend import PlannedFleet, PoolSnapshot, ReplicaSnapshot
from .node_capacity import find_missing_capacity
from .pending_reason import ResourceNeed, combine_needs, pending_reason
from .planned_fleet import plan_from_spec
from .ray_nodes import living_nodes
from .weight_sources import resolve_below_roots

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
AppBuilder = Callable[[Mapping[str, str]], Any]  # returns the application, with these models for the named pools

RESPONSE_TIMEOUT_S = 5.0  # timeout of Serve's controller and the ingress, which usually answer within milliseconds
UPDATE_S = 1800.0  # timeout of weight updates, which take as long as disks and cores need
STARTING = "replicas are starting"
TOKENIZER = "tokenizer.json"
_STATES: Mapping[str, Literal["running", "stopping"]] = {
    "RUNNING": "running",
    "PENDING_MIGRATION": "running",
    "STOPPING": "stopping",
    "STOPPED": "stopping",
}
_POOL_STATES: Mapping[str, Literal["healthy", "failed"]] = {"HEALTHY": "healthy", "DEPLOY_FAILED": "failed"}


class ServeBackend:
    """Implementation of `Fleet` by Ray Serve.

    app     name of the Serve application
    build   builds the application again
    joined  the Ray cluster is not the service's own: nodes may join it, so what cannot be placed now may be later
    """

    def __init__(self, app: str, build: AppBuilder, *, joined: bool = True) -> None:
        self._app = app
        self._build = build
        self._joined = joined
        self._checked: FleetSpec | None = None  # the fleet that `_homeless` is of
        self._homeless: frozenset[str] = frozenset()  # pools that no node could hold a replica of
        self._handle: Any = None
        self._details: dict[str, DeploymentDetails] = {}
        self._gathered = FleetStatusMerger()

    async def planned(self) -> PlannedFleet | None:
        deployed = await asyncio.to_thread(read_deployed)
        if deployed is None:
            return None
        if not self._joined and deployed.fleet != self._checked:
            nodes = await asyncio.to_thread(living_nodes)
            found = find_missing_capacity(deployed.fleet, nodes, labels_match)
            self._homeless = frozenset(deployed.fleet.pools[lack.pool].name for lack in found)
            self._checked = deployed.fleet
        return plan_from_spec(deployed.fleet)

    async def snapshots(self) -> Mapping[str, PoolSnapshot]:
        found = {}
        for name in await self._pools():
            details = await self._call_controller(fetch_deployment_details, self._app, name)
            self._details[name] = details
            found[name] = PoolSnapshot(
                target=details.target_num_replicas,
                replicas=tuple(_replica(one) for one in details.replicas),
                version=(await self._settings(name)).version,
                state=_POOL_STATES.get(details.status.value, "changing"),
                message=_last_line(details.message),
                failing=_last_line(details.message) if _does_not_start(details) else "",
                placeable=name not in self._homeless,
            )
        return found

    async def status(self, failing: str = "") -> FleetStatus | None:
        """Return the combined status of all ingresses; None if none answers."""
        return self._gathered.together(await self._of_ingresses("fleet", failing))

    async def mark(self, replica_id: str) -> bool:
        """Make a replica refuse new requests.

        One ingress that reaches it is enough: the replica itself tells the others.
        """
        return any(await self._of_ingresses("drain_replica", replica_id))

    async def flush(self, tenant: str | None) -> int:
        return int(await self._call_ingress("flush_prefixes", tenant))

    async def prefixes(self) -> Sequence[PrefixStatus]:
        response: Sequence[PrefixStatus] = await self._call_ingress("prefixes")
        return response

    async def explain(self, request: str) -> FoundRoutes:
        try:
            found: list[FoundRoutes] = await call_every_ingress(
                await self._ingress(), "explain_route", request, timeout_s=RESPONSE_TIMEOUT_S
            )
        except (RayError, RayServeException, TimeoutError) as error:
            raise _no_ingress(error) from error
        if not found:
            raise Unavailable("no ingress runs; try again shortly", code="no_ingress")
        return join_routes(found)

    async def check_weights(self, path: str) -> Path:
        deployed = await asyncio.to_thread(read_deployed)
        roots = () if deployed is None else deployed.fleet.security.weights_roots
        return await asyncio.to_thread(resolve_below_roots, path, roots)

    async def update_weights(self, pool: str, file: WeightFile, version: int) -> Sequence[WeightStatus]:
        response: Sequence[WeightStatus] = await self._call_ingress(
            "update_weights", pool, file, version, timeout_s=UPDATE_S
        )
        return response

    async def pending(self, pool: str) -> str:
        details = self._details[pool]
        waits = [one for one in details.replicas if one.state.value == "STARTING" and one.node_id is None]
        if details.status.value == "DEPLOY_FAILED":
            return f"replicas do not start: {_last_line(details.message)}"
        if waits:
            needs = _needs(await self._settings(pool))
            nodes = await asyncio.to_thread(living_nodes)
            if lack := pending_reason(needs, nodes, labels_match):
                return lack
        # Once any replica has started, Serve retries forever, and only says so in this message.
        if FAILED_START in details.message:
            return f"the last that was tried did not start: {_last_line(details.message)}"
        return STARTING

    async def set_target(self, pool: str, replicas: int) -> None:
        await self._call_controller(set_number_of_replicas, self._app, pool, replicas)

    async def end(self, replica_id: str) -> None:
        """Kill a replica's process, which is known to be idle or to have used up its time."""
        for details in self._details.values():
            for one in details.replicas:
                if one.replica_id == replica_id:
                    with suppress(ValueError):  # the actor is gone already
                        ray.kill(await asyncio.to_thread(find_replica_actor, one.actor_name))

    async def check_model(self, model: str) -> None:
        await asyncio.to_thread(self._check_model, model)

    async def redeploy(
        self, targets: Mapping[str, int], versions: Mapping[str, str], models: Mapping[str, str]
    ) -> None:
        now = {name: (await self._settings(name)).version for name in (INGRESS, *targets)}
        nodes = await asyncio.to_thread(living_nodes)
        has_capacity = {
            name: not pending_reason(_needs(await self._settings(name)), nodes, labels_match) for name in versions
        }
        await asyncio.to_thread(self._deploy, targets, {**now, **versions}, models, has_capacity)

    def _deploy(
        self,
        targets: Mapping[str, int],
        versions: Mapping[str, str],
        models: Mapping[str, str],
        has_capacity: Mapping[str, bool],
    ) -> None:
        """Deploy the application. Deployments that keep their version keep their replicas.

        has_capacity  by pool, whether its nodes have capacity for one more replica: then a new one serves before an old
                      one leaves
        """

        def change(name: str) -> DeploymentChange:
            surge = math.ceil(100 / targets[name]) if has_capacity.get(name) and targets[name] else None
            return DeploymentChange(version=versions[name], replicas=targets.get(name), max_surge_percent=surge)

        redeploy_application(self._build(models), self._app, change)

    def _check_model(self, model: str) -> None:
        deployed = read_deployed()
        assert deployed is not None, "there is a pool to be rolled"
        try:
            new, old = resolve_model(model), resolve_model(deployed.fleet.model)
            check_servable_in_child(new)
        except MotleyError as error:
            raise InvalidRequest(f"model: {error.message}", param="model", code="invalid_value") from error
        missing = [folder for folder in (new, old) if not (folder / TOKENIZER).is_file()]
        if missing:
            raise InvalidRequest(
                f"model: {missing[0].name} has no {TOKENIZER}, by which it is told that both models read text alike; "
                "write one with transformers' AutoTokenizer.from_pretrained and save_pretrained",
                param="model",
                code="invalid_value",
            )
        if (new / TOKENIZER).read_bytes() != (old / TOKENIZER).read_bytes():
            raise InvalidRequest(
                "model: its tokenizer is not that of the model served; start a service of its own for it",
                param="model",
                code="invalid_value",
            )

    async def _pools(self) -> list[str]:
        names = deployment_names(await self._call_controller(fetch_deployment_ids), self._app)
        return [name for name in names if name != INGRESS]

    async def _settings(self, name: str) -> DeployedSettings:
        return read_settings(await self._call_controller(fetch_deployment_settings, self._app, name))

    async def _call_controller(self, call: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Return an answer of Serve's controller, which `ask` is called with. Raises Unavailable."""
        try:
            if self._controller is None:
                self._controller = await asyncio.to_thread(find_controller)
            return await _in_time(call(self._controller, *args))
        except (RayError, ValueError, KeyError, TimeoutError) as error:
            raise Unavailable(
                f"Serve's controller does not answer: {_last_line(str(error))}", code="no_controller"
            ) from error

    _controller: Any = None

    async def _of_ingresses(self, method: str, *args: Any) -> list[Any]:
        """Return the answers of all ingresses; none if they do not answer."""
        with suppress(RayError, RayServeException, TimeoutError):
            return await call_every_ingress(await self._ingress(), method, *args, timeout_s=RESPONSE_TIMEOUT_S)
        return []

    async def _call_ingress(self, method: str, *args: Any, timeout_s: float = RESPONSE_TIMEOUT_S) -> Any:
        """Return the answer of any one ingress. Raises Unavailable."""
        try:
            return await _in_time(getattr(await self._ingress(), method).remote(*args), timeout_s)
        except (RayError, RayServeException, TimeoutError) as error:
            raise _no_ingress(error) from error

    async def _ingress(self) -> Any:
        if self._handle is None:
            self._handle = await asyncio.to_thread(serve.get_app_handle, self._app)
        return self._handle


def _no_ingress(error: Exception) -> Unavailable:
    return Unavailable(f"an ingress does not answer: {_last_line(str(error))}", code="no_ingress")


def _does_not_start(details: DeploymentDetails) -> bool:
    return details.status.value == "DEPLOY_FAILED" or FAILED_START in details.message


async def _in_time(response: Awaitable[ResultT], timeout_s: float = RESPONSE_TIMEOUT_S) -> ResultT:
    async def waited() -> ResultT:
        return await response

    return await asyncio.wait_for(waited(), timeout_s)


def _replica(details: ReplicaDetails) -> ReplicaSnapshot:
    return ReplicaSnapshot(
        replica_id=details.replica_id,
        state=_STATES.get(details.state.value, "starting"),
        node=details.node_ip or "",
        pid=details.pid or 0,
        started=details.start_time_s,
    )


def _needs(settings: DeployedSettings) -> list[ResourceNeed]:
    """Return what a replica needs from nodes.

    That is one need for each bundle, one for all bundles if they must share a node, or one for its single actor.
    """
    if bundles := settings.bundles:
        labels = [*settings.bundle_labels, *[{}] * len(bundles)][: len(bundles)]
        needs = [ResourceNeed(bundle, label) for bundle, label in zip(bundles, labels, strict=True)]
        return [combine_needs(needs)] if settings.strategy == "STRICT_PACK" else needs
    options = settings.actor_options
    resources = {"CPU": options.get("num_cpus") or 0.0, "GPU": options.get("num_gpus") or 0.0}
    resources |= {"memory": options.get("memory") or 0.0, **(options.get("resources") or {})}
    if kind := options.get("accelerator_type"):
        resources[f"accelerator_type:{kind}"] = 0.001
    return [
        ResourceNeed(
            {name: amount for name, amount in resources.items() if amount}, options.get("label_selector") or {}
        )
    ]


def _last_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else ""
