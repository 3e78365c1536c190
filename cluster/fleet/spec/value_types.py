"""Values that entries of a fleet file may have: their types, limits and patterns, and the base of all its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from ....replicas.byte_sizes import MAX_SIZE, parse_size
from ....replicas.engine_config import MAX_COUNT, MAX_PARALLEL, MAX_SECONDS
from ....replicas.errors import InvalidRequest
from .accepted_capabilities import CAPABILITY_PATTERN

MAX_REPLICAS = 10_000
MAX_OBJECTIVE_S = 3600.0  # a longer objective would not be one
MAX_QUANTITY = 1e9  # maximum of weights, prices and resources, so that sums and products stay finite
MIN_QUANTITY = 0.0001  # smallest amount of a resource that Ray distinguishes from none; safe to divide by
NAME = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"
_DEVICE = r"(cpu|cuda(:\d{1,2})?)"
DEVICE = f"^{_DEVICE}(,{_DEVICE})*$"
CAPABILITY = f"^{CAPABILITY_PATTERN}$"
LABEL_NAME = r"^[A-Za-z0-9]([A-Za-z0-9_./-]{0,250}[A-Za-z0-9])?$"
_VALUE = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
LABEL_VALUE = rf"^!?({_VALUE}|in\({_VALUE}(, ?{_VALUE})*\))$"
PATTERNS = {  # what each pattern accepts, in words
    NAME: "lower-case letters, digits and hyphens, at most 40",
    DEVICE: "cpu, cuda, or cuda:N; or one for each stage, such as cuda,cpu",
    CAPABILITY: "one such as 7.5 or >=8.0",
    LABEL_NAME: "the name of a label",
    LABEL_VALUE: "a label's value such as T4, in(T4, L4) or !T4",
}


def spec_error(message: str, *at: str | int) -> PydanticCustomError:
    """Return the error that a validator raises; `at` is the path from its own model to the value at fault."""
    return PydanticCustomError("fleet", "{message}", {"message": message, "at": at})


def _bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return 0 if value.strip() == "0" else parse_size(value)
    except InvalidRequest as error:
        raise spec_error(error.message) from None


def _path(value: Any, info: ValidationInfo) -> Any:
    """Return a path relative to the folder of the fleet file, which the validation context names."""
    if not isinstance(value, str) or not value:
        return value
    return Path((info.context or {}).get("folder", "."), Path(value).expanduser())


def _capability(value: Any) -> Any:
    """Return a compute capability as text, since YAML reads 7.5 as a number."""
    return f"{value:.1f}" if isinstance(value, int | float) and not isinstance(value, bool) else value


_SIZE = {
    "type": ["string", "integer"],
    "pattern": r"^\s*\d+(\.\d+)?\s*([kKmMgGtT]?i?)[bB]?\s*$",
    "minimum": 0,
    "maximum": MAX_SIZE,
}
Size = Annotated[int, BeforeValidator(_bytes), Field(ge=0, le=MAX_SIZE), WithJsonSchema(_SIZE)]
FilePath = Annotated[Path, BeforeValidator(_path), WithJsonSchema({"type": "string"})]
Name = Annotated[str, Field(pattern=NAME)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(ge=0, le=7 * 24 * 3600, allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=MIN_QUANTITY, le=MAX_QUANTITY, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=MAX_QUANTITY, allow_inf_nan=False)]
Timeout = Annotated[float, Field(ge=MIN_QUANTITY, le=MAX_SECONDS, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Parallel = Annotated[int, Field(ge=1, le=MAX_PARALLEL)]
Objective = Annotated[float, Field(ge=0.001, le=1000 * MAX_OBJECTIVE_S, allow_inf_nan=False)]  # milliseconds
LabelName = Annotated[str, Field(pattern=LABEL_NAME)]
LabelValue = Annotated[str, Field(pattern=LABEL_VALUE)]
Capability = Annotated[
    str,
    BeforeValidator(_capability),
    Field(pattern=CAPABILITY),
    WithJsonSchema({"type": ["string", "number"], "pattern": CAPABILITY}),
]


class Spec(BaseModel):
    """Base of all types of a fleet file. It guesses nothing: a number is not text, and unknown entries are refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)
