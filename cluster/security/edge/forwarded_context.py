"""Mark by which the ingress sees that a call came through Serve's own proxy. Imports Serve, so serve_patches.py
imports it late.
"""

from __future__ import annotations

from ray.serve.grpc_util import RayServegRPCContext


class ForwardedContext(RayServegRPCContext):  # type: ignore[misc]
    """gRPC context in place of Serve's own, which travels with the call. Serve's proxy learns a stream's status only
    by an exception.
    """

    forwarded = True
