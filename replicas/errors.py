"""The one family of errors that users see, whatever the protocol.

Each carries what a translator needs: `status` (HTTP), `grpc_code` (name of the gRPC status), `kind`
(OpenAI's `type`), `param` (the field at fault) and `code` (a stable machine-readable word).
"""

from __future__ import annotations


class MotleyError(Exception):
    """Base of every error raised on purpose."""

    status = 500
    grpc_code = "INTERNAL"
    kind = "server_error"
    usual_code: str | None = None  # where none is given

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.usual_code
        self.retry_after_s = retry_after_s  # when trying again may help; None: nobody has reckoned

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
    """A field is wrong; `param` names it."""

    status = 400
    grpc_code = "INVALID_ARGUMENT"
    kind = "invalid_request_error"
    usual_code = "invalid_value"


class NotFound(MotleyError):
    """No such model or resource."""

    status = 404
    grpc_code = "NOT_FOUND"
    kind = "invalid_request_error"


class Overloaded(MotleyError):
    """The replica has no room now; trying again later or elsewhere may succeed."""

    status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    kind = "overloaded_error"


class Unavailable(MotleyError):
    """The service is starting, draining or has lost its replica."""

    status = 503
    grpc_code = "UNAVAILABLE"
    kind = "server_error"


class DeadlineExceeded(MotleyError):
    """The request's own deadline has passed."""

    status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    usual_code = "deadline_exceeded"
    kind = "timeout_error"


class ReaderStalled(MotleyError):
    """The client took nothing of its answer for too long; the request was ended to free what it held."""

    status = 408
    grpc_code = "CANCELLED"
    kind = "timeout_error"


class EngineFault(MotleyError):
    """A step failed; the sequences in it ended with this."""

    usual_code = "engine_fault"


class EngineLost(EngineFault):
    """Nothing of this engine works any more: it ends, and not the sequences of a step alone."""


class CheckpointError(MotleyError):
    """A checkpoint cannot be loaded. Names the file and, where there is one, the tensor or key."""

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
