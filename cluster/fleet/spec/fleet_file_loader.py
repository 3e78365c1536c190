"""Reader of fleet files: YAML that becomes a FleetSpec, or an error with the line of what is wrong."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ....replicas.errors import InvalidRequest
from ....replicas.short_repr import short_repr
from .fleet_spec import FleetSpec
from .pool_spec import AttainedSpec
from .value_types import PATTERNS
from .yaml_lines import ValuePath, YamlLines, read_yaml

DEMO = "demo"
_SHOULD = re.compile(r"^[A-Z]\w+ should (be|have) ")  # beginning of pydantic's messages


@dataclass(frozen=True, slots=True)
class FleetFile:
    """A fleet file that was read.

    spec   the fleet
    lines  positions of the values in the file
    said   content of the file, without defaults
    """

    spec: FleetSpec
    lines: YamlLines
    said: dict[str, Any]

    def says(self, *at: str | int) -> bool:
        return at in self.lines.values


def load_fleet(path: Path) -> FleetFile:
    """Read a fleet file. Raises ConfigurationError: FILE:LINE:COLUMN, the value's name, and what would be accepted."""
    said, lines = read_yaml(path)
    try:
        spec = FleetSpec.model_validate(said, context={"folder": path.absolute().parent})
    except ValidationError as error:
        raise _first_error(error, lines) from None
    _check_simulated(spec, lines)
    return FleetFile(_with_absolute_models(_with_attained_shares(spec, lines), path.absolute().parent), lines, said)


def _with_absolute_models(spec: FleetSpec, folder: Path) -> FleetSpec:
    """Make the folders of models absolute, since replicas have a working directory of their own."""
    pools = []
    for pool in spec.pools:
        model = pool.quantization.model
        own = pool.quantization.model_copy(update={"model": None if model is None else _model(model, folder)})
        pools.append(pool.model_copy(update={"quantization": own}))
    return spec.model_copy(update={"model": _model(spec.model, folder), "pools": pools})


def _model(name: str, folder: Path) -> str:
    path = folder / Path(name).expanduser()
    return str(path) if name != DEMO and path.is_dir() else name


def _check_simulated(spec: FleetSpec, lines: YamlLines) -> None:
    if all(pool.simulate is None for pool in spec.pools):
        return
    from ....replicas.simulated.simulated_device import find_model_shape, find_table_device  # imports torch

    for number, pool in enumerate(spec.pools):
        for name, find in (("simulate", find_table_device), ("simulate_model", find_model_shape)):
            try:
                if (value := getattr(pool, name)) is not None:
                    find(value)
            except InvalidRequest as error:
                raise lines.error(("pools", number, name), error.message.partition(": ")[2]) from None


def _with_attained_shares(spec: FleetSpec, lines: YamlLines) -> FleetSpec:
    """Replace files of measurements by the shares that simulated GPUs attain, since replicas may lack the files."""
    if all(pool.measured is None for pool in spec.pools):
        return spec
    from ....replicas.simulated.device_measurements import read_attained_shares  # imports torch

    pools = []
    for number, pool in enumerate(spec.pools):
        if pool.measured is not None and pool.simulate is not None:
            try:
                found = AttainedSpec(**asdict(read_attained_shares(pool.measured, pool.simulate, pool.simulate_model)))
            except InvalidRequest as error:
                raise lines.error(("pools", number, "measured"), error.message.partition(": ")[2]) from None
            pool = pool.model_copy(update={"measured": None, "attained": found})
        pools.append(pool)
    return spec.model_copy(update={"pools": pools})


def _first_error(error: ValidationError, lines: YamlLines) -> Exception:
    """Return the error for the first mistake in the file, with the number of the others."""
    found = [(_error_path(each), each) for each in error.errors(include_url=False)]
    at, each = min(found, key=lambda pair: lines.order(pair[0]))
    more = "" if len(found) == 1 else f" (and {len(found) - 1} more)"
    return lines.error(
        at, describe_error(each, at) + more, key=each["type"] == "extra_forbidden" or "[key]" in each["loc"]
    )


def _error_path(error: Any) -> ValuePath:
    """Return the path of the value at fault.

    Our own validators add the path within their model; map keys are left out.
    """
    at = tuple(part for part in error["loc"] if part != "[key]")
    return (*at, *error.get("ctx", {}).get("at", ())) if error["type"] == "fleet" else at


def describe_error(error: Any, at: ValuePath) -> str:
    """Describe one of pydantic's errors, of the value at `at`, in our words."""
    kind, said = error["type"], error["msg"]
    if kind == "fleet":
        return str(said)
    if kind == "missing":
        return "it is missing"
    if kind == "extra_forbidden":
        return _unknown(str(at[-1]), at[:-1])
    return f"{short_repr(error['input'])} is not accepted; expected {_expected(error)}"


def _expected(error: Any) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "string_pattern_mismatch":
        return PATTERNS[context["pattern"]]
    if kind in ("model_type", "dict_type"):
        return "entries, each `name: value`"
    if kind == "too_short":
        return f"a list of at least {context['min_length']}"
    message = _SHOULD.sub("", str(error["msg"]))
    for long, short in (
        ("greater than or equal to", "at least"), ("less than or equal to", "at most"), ("greater than", "more than"),
        ("a valid string", "text"), ("a valid integer", "an integer"), ("a valid number", "a number"),
        ("a valid boolean", "true or false"), ("a valid list", "a list"),
    ):  # fmt: skip
        message = message.replace(long, short)
    return message


def _unknown(name: str, at: ValuePath) -> str:
    names = sorted(_fields(at))
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
    return f"there is no such entry; {hint}"


def _fields(at: ValuePath) -> Iterable[str]:
    """Return the names of the fields of the model at this path."""
    model: Any = FleetSpec
    for part in at:
        model = model.model_fields[part].annotation if isinstance(part, str) and _is_model(model) else _item_type(model)
        model = _without_none(model)
    return model.model_fields if _is_model(model) else ()


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _without_none(kind: Any) -> Any:
    """Return X for the type `X | None`, and any other type as it is."""
    if isinstance(kind, types.UnionType):
        return next(each for each in typing.get_args(kind) if each is not type(None))
    return kind


def _item_type(kind: Any) -> Any:
    """Return the type of a list's items or of a mapping's values."""
    return typing.get_args(kind)[-1] if typing.get_args(kind) else kind
