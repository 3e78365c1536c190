"""Calls by Serve's handles, and the router that Serve asks where each goes. Imports Ray only where a handle is made."""

from __future__ import annotations

from typing import Any


def deployment_handle(name: str, app: str) -> Any:
    """Return the handle of a deployment, which need not exist yet."""
    from ray import serve

    return serve.get_deployment_handle(name, app, _check_exists=False)


def by_value(handle: Any) -> Any:
    """Return a handle whose calls carry messages themselves, and not through Ray's object store."""
    return handle.options(_by_reference=False)


def replica_call(response: Any) -> Any:
    """Return the future of a call to a replica, by which `response` learns which call it is; None if there is none."""
    return getattr(response, "_replica_result_future", None)


def router_deployment(router: Any) -> str:
    """Return the name of the deployment whose replicas this `RequestRouter` chooses among."""
    return str(router._deployment_id.name)


def cached_queue_len(router: Any, replica: Any) -> int:
    """Return how many requests the replica had when Serve last heard of it."""
    return router.replica_queue_len_cache.get(replica.replica_id) or 0


def forget_queue_len(router: Any, replica: Any) -> None:
    """Make Serve ask the replica for its queue before it sends it a request."""
    router.replica_queue_len_cache.invalidate_key(replica.replica_id)


def pause_before_next_choice(pending: Any, pause: bool) -> None:
    """Tell Serve whether to wait a little before it asks once more for a replica for this request."""
    pending.routing_context.should_backoff = pause
