"""Errors of the door and of starting up that need no Ray: errors.py, which imports it, has the others."""

from __future__ import annotations

from ..replicas.errors import MotleyError


class ConfigurationError(MotleyError):
    """The service cannot start as asked. One line, with the remedy."""

    kind = "configuration_error"


class Forbidden(MotleyError):
    """This door is for this machine only."""

    status = 403
    grpc_code = "PERMISSION_DENIED"
    kind = "permission_error"


class Unauthenticated(MotleyError):
    """No API key came with the call, or none that is accepted; which of them is not told."""

    status = 401
    grpc_code = "UNAUTHENTICATED"
    kind = "authentication_error"


class Conflict(MotleyError):
    """What was decided on has changed meanwhile, or is changing."""

    status = 409
    grpc_code = "ABORTED"
    kind = "invalid_request_error"


class NotConfirmed(MotleyError):
    """It would do what must be asked for in so many words, or cannot be undone."""

    status = 412
    grpc_code = "FAILED_PRECONDITION"
    kind = "invalid_request_error"
