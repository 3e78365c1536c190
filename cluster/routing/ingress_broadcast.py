"""Calls to every replica of the ingress; `remote` of Serve's handles reaches only one of them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from ...replicas.errors import Unavailable
from ..service_errors import ConfigurationError
from .queueing.request_queue import RoutingConfig

APPLICATION = "motley"  # name of the Serve application
INGRESS = "ingress"  # Serve's name for the deployment
SET_POOLS_TIMEOUT_S = 30.0
BROADCAST_TIMEOUT_S = 10.0


async def set_ingress_pools(names: list[str], routing: RoutingConfig | None = None) -> None:
    """Make every ingress send requests to these pools from now on, by this routing. Raises ConfigurationError."""
    from ray import serve

    responses: list[Any] = []
    with suppress(TimeoutError):
        responses = await call_every_ingress(
            serve.get_app_handle(APPLICATION), "use_pools", names, routing, timeout_s=SET_POOLS_TIMEOUT_S
        )
    if not responses:
        message = f"an ingress has not answered for {SET_POOLS_TIMEOUT_S:g} s; try again when the service is well"
        raise ConfigurationError(message, code="deploy_failed")


async def broadcast_to_ingresses(method: str, *args: Any) -> None:
    """Call a method on every ingress, the caller included; does nothing if Serve does not run. Raises Unavailable."""
    import ray
    from ray import serve

    if not ray.is_initialized():
        return
    handle = await asyncio.to_thread(serve.get_app_handle, APPLICATION)  # it asks Serve's controller
    try:
        await call_every_ingress(handle, method, *args, timeout_s=BROADCAST_TIMEOUT_S)
    except TimeoutError:
        raise Unavailable(
            f"an ingress has not answered for {BROADCAST_TIMEOUT_S:g} s; try again", code="unavailable"
        ) from None


async def call_every_ingress(handle: Any, method: str, *args: Any, timeout_s: float) -> list[Any]:
    """Return the answers of all ingresses, without those that have ended. Raises what any other raises, and
    TimeoutError.

    handle  handle of the application

    It is a coroutine, since Serve's handles need a running loop.
    """
    from ray.exceptions import ActorDiedError, ActorUnavailableError
    from ray.serve.exceptions import DeploymentUnavailableError

    try:
        responses = handle.broadcast(method, *args)
        found = await asyncio.wait_for(responses.results_async(return_exceptions=True), timeout_s)
    except DeploymentUnavailableError:
        return []
    errors = [each for each in found if isinstance(each, BaseException)]
    for error in errors:
        if not isinstance(error, ActorDiedError | ActorUnavailableError):
            raise error
    return [each for each in found if not isinstance(each, BaseException)]
