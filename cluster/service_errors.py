"""Errors of the ingress and of starting up that need no Ray; request_errors.py, which imports this module, has the
others.
"""

from __future__ import annotations

from ..replicas.errors import MotleyError


class ConfigurationError(MotleyError):
    """The service cannot start as asked. One line, with the remedy."""

    kind = "configuration_error"


class Forbidden(MotleyError):
    """The caller may not do this; without API keys only this machine may call."""

    status = 403
    grpc_code = "PERMISSION_DENIED"
    kind = "permission_error"


class Unauthenticated(MotleyError):
    """No API key came with the call, or none that is accepted; the error does not say which."""

    status = 401
    grpc_code = "UNAUTHENTICATED"
    kind = "authentication_error"


class Conflict(MotleyError):
    """The state that a decision was based on has changed meanwhile, or is changing."""

    status = 409
    grpc_code = "ABORTED"
    kind = "invalid_request_error"


class NotConfirmed(MotleyError):
    """The request lacks the flag that its action needs, since that cannot be undone: `allow_zero`, for example."""

    status = 412
    grpc_code = "FAILED_PRECONDITION"
    kind = "invalid_request_error"
