"""Serve's controller: the actor, what it says of applications and their deployments, and the number of replicas."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedSettings:
    """Settings that Serve keeps of a deployment.

    version         version of its replicas
    bundles         resources of each bundle of a replica's placement group; empty: it has none
    bundle_labels   label selectors of the first bundles
    strategy        how the bundles are spread over nodes
    actor_options   options of a replica's actor
    """

    version: str
    bundles: Sequence[Mapping[str, float]] = ()
    bundle_labels: Sequence[Mapping[str, str]] = ()
    strategy: str = ""
    actor_options: Mapping[str, Any] = field(default_factory=dict)


def find_controller() -> Any:
    """Return the actor of Serve's controller. Raises ValueError if Serve does not run."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    return ray.get_actor(SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)


def find_replica_actor(name: str) -> Any:
    """Return the actor of a replica by the name in Serve's details. Raises ValueError if it is gone."""
    import ray
    from ray.serve._private.constants import SERVE_NAMESPACE

    return ray.get_actor(name, SERVE_NAMESPACE)


def check_controller(timeout_s: float) -> None:
    """Ask Serve's controller whether it lives. Raises ValueError, ray.exceptions.RayError or TimeoutError if it does
    not answer.
    """
    import ray

    ray.get(find_controller().check_alive.remote(), timeout=timeout_s)


def fetch_deployment_ids(controller: Any) -> Awaitable[Any]:
    """Ask for the ids of the deployments of all applications; `deployment_names` reads the answer."""
    response: Awaitable[Any] = controller.list_deployment_ids.remote()
    return response


def deployment_names(ids: Iterable[Any], app: str) -> list[str]:
    """Return the names of the application's deployments, sorted."""
    return sorted(one.name for one in ids if one.app_name == app)


def fetch_deployment_details(controller: Any, app: str, name: str) -> Awaitable[Any]:
    """Ask for a deployment's state and its replicas: `ray.serve.schema.DeploymentDetails`."""
    response: Awaitable[Any] = controller.get_deployment_details.remote(app, name)
    return response


def fetch_deployment_settings(controller: Any, app: str, name: str) -> Awaitable[Any]:
    """Ask for what Serve keeps of a deployment; `read_settings` reads the answer."""
    response: Awaitable[Any] = controller.get_deployment_info.remote(name, app)
    return response


def set_number_of_replicas(controller: Any, app: str, name: str, replicas: int) -> Awaitable[Any]:
    """Ask for so many replicas of a deployment whose application has an external scaler."""
    from ray.serve._private.common import DeploymentID

    response: Awaitable[Any] = controller.update_deployment_replicas.remote(DeploymentID(name, app), replicas)
    return response


def read_settings(route: bytes) -> DeployedSettings:
    """Return what Serve keeps of a deployment, from the answer to `fetch_deployment_settings`."""
    from ray.serve.generated.serve_pb2 import DeploymentRoute

    info = DeploymentRoute.FromString(route).deployment_info
    config = info.replica_config
    return DeployedSettings(
        version=str(info.version),
        bundles=json.loads(config.placement_group_bundles or b"null") or (),
        bundle_labels=json.loads(config.placement_group_bundle_label_selector or b"null") or (),
        strategy=config.placement_group_strategy,
        actor_options=json.loads(config.ray_actor_options or b"{}"),
    )


def application_details(app: str) -> Mapping[str, Any] | None:
    """Return what Serve says of an application; None if it has none of that name. Raises
    ray.serve.exceptions.RayServeException if Serve does not run.
    """
    from ray.serve.context import _get_global_client

    return _details(_get_global_client(), app)


def find_application(app: str) -> Mapping[str, Any] | None:
    """Return what Serve says of an application; None if there is none, or Serve does not run."""
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else _details(client, app)


def deployed_versions(app: str, names: Sequence[str]) -> dict[str, str]:
    """Return the versions of these deployments, as Serve has them."""
    import ray
    from ray.serve.context import _get_global_client

    controller = _get_global_client()._controller
    routes = ray.get([fetch_deployment_settings(controller, app, name) for name in names])
    return {name: read_settings(route).version for name, route in zip(names, routes, strict=True)}


def _details(client: Any, app: str) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = client.get_serve_details()["applications"].get(app)
    return found
