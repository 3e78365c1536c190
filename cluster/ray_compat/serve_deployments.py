"""Serve's applications: what its public functions do not set, and do not change while replicas go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class LateAppDeployment:
    """Base of a deployment class for `serve.ingress()` without an app: its replicas build their ASGI app themselves,
    once they are initialised.
    """

    def build_asgi_app(self) -> Any:
        raise NotImplementedError

    def __serve_build_asgi_app__(self) -> Any:
        return self.build_asgi_app()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentChange:
    """Change of a deployment.

    version            version of its replicas: one that differs from Serve's replaces them
    replicas           number of replicas, which may be 0; None: as it was built
    max_surge_percent  new replicas beside all old ones, in percent of these; None: as it was built
    """

    version: str
    replicas: int | None = None
    max_surge_percent: int | None = None


def deploy_application(app: Any, name: str) -> None:
    """Deploy the application at the root of the HTTP port, or what is new of it; returns before it runs.

    Something else than Serve decides how many replicas there are, and Ray's dashboard lets those with its token do so.
    """
    from ray import serve

    serve._run(app, name=name, route_prefix="/", external_scaler_enabled=True, _blocking=False)


def pin_deployment(deployment: Any, version: str, replicas: int) -> None:
    """Set what Serve's decorator does not take: a version, without which every deploy restarts all replicas, and 0
    replicas.
    """
    assert deployment.version is None
    deployment._version = version
    deployment._deployment_config.num_replicas = replicas


def redeploy_application(app: Any, name: str, change: Callable[[str], DeploymentChange]) -> None:
    """Deploy an application again, with a change of each of its deployments; returns before it runs.

    Deployments that keep their version keep their replicas.
    """
    import ray
    from ray.serve._private.build_app import build_app
    from ray.serve.context import _get_global_client

    application = build_app(
        app,
        name=name,
        route_prefix="/",
        default_runtime_env=ray.get_runtime_context().runtime_env,
        external_scaler_enabled=True,
    )
    application.deployments[:] = [_changed(one, change(one.name)) for one in application.deployments]
    _get_global_client().deploy_applications(
        [application], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
    )


def _changed(deployment: Any, change: DeploymentChange) -> Any:
    changed = deployment.options(version=change.version, _internal=True)
    config = changed._deployment_config
    if change.replicas is not None:
        config.num_replicas = change.replicas  # may be 0, which `options` refuses
    if change.max_surge_percent is not None:
        config.max_surge_percent = change.max_surge_percent
    return changed
