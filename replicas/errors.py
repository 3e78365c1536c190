"""Errors that users see, one family for all protocols.

Each carries what a translator needs: `status` (HTTP), `grpc_code` (name of the gRPC status), `kind`
(OpenAI's `type`), `param` (the field at fault) and `code` (a stable machine-readable word).
"""

from __future__ import annotations


class MotleyError(Exception):
    """Base of every error raised on purpose."""

    status = 500
    grpc_code = "INTERNAL"
    kind = "server_error"
    usual_code: str | None = None  # `code` where none is given

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.usual_code
        self.retry_after_s = retry_after_s  # seconds after which a retry may succeed; None: unknown

    def __reduce__(self) -> tuple[object, ...]:
        # Ray carries exceptions between processes; keyword-only fields need this to survive the trip.
        return (_rebuild, (type(self), self.message, self.param, self.code, self.retry_after_s))


def _rebuild(
    cls: type[MotleyError], message: str, param: str | None, code: str | None, retry_after_s: int | None
) -> MotleyError:
    error = cls(message, param=param, code=code)
    error.retry_after_s = retry_after_s
    return error


class InvalidRequest(MotleyError):
    """Error for a request with a wrong field; `param` names the field."""

    status = 400
    grpc_code = "INVALID_ARGUMENT"
    kind = "invalid_request_error"
    usual_code = "invalid_value"


class NotFound(MotleyError):
    """Error for a model or resource that does not exist."""

    status = 404
    grpc_code = "NOT_FOUND"
    kind = "invalid_request_error"


class Overloaded(MotleyError):
    """Error for a request that is refused as too much is waiting; a retry later or elsewhere may succeed."""

    status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    kind = "overloaded_error"


class Unavailable(MotleyError):
    """Error for a service that is starting, draining or has lost its replica."""

    status = 503
    grpc_code = "UNAVAILABLE"
    kind = "server_error"


class DeadlineExceeded(MotleyError):
    """Error for a request whose own deadline has passed."""

    status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    usual_code = "deadline_exceeded"
    kind = "timeout_error"


class ReaderStalled(MotleyError):
    """Error for a client that read nothing of its response for too long; the request was ended to free what it held."""

    status = 408
    grpc_code = "CANCELLED"
    kind = "timeout_error"


class EngineFault(MotleyError):
    """Error that ends the sequences of a step that failed."""

    usual_code = "engine_fault"


class EngineLost(EngineFault):
    """Error after which nothing of this engine works any more: the engine ends, not only the sequences of a step."""


class CheckpointError(MotleyError):
    """Error for a checkpoint that cannot be loaded. Names the file and, where there is one, the tensor or key."""

    def __init__(
        self,
        message: str,
        *,
        file: str = "",
        tensor: str = "",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        where = " · ".join(part for part in (file, tensor) if part)
        super().__init__(f"{where}: {message}" if where else message, param=param, code=code or "bad_checkpoint")
        self.file = file
        self.tensor = tensor
