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
