"""How the ingress sees that a call came by Serve's own proxy. Imports Serve: hook.py takes it in when that runs."""

from __future__ import annotations

from ray.serve.grpc_util import RayServegRPCContext


class ForwardedContext(RayServegRPCContext):  # type: ignore[misc]
    """In place of Serve's own, which travels with the call. That proxy learns how a stream ended by an exception."""

    forwarded = True
