"""Option `--config FILE`: the file's values override defaults, and flags override the file."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..replicas.short_repr import short_repr

MAX_BYTES = 2**20


def _load(context: typer.Context, path: Path | None) -> Path | None:
    if path is not None and not context.resilient_parsing:
        values = _options(context, _read(path), path)
        context.default_map = {**(context.default_map or {}), **values}
    return path


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise typer.BadParameter(f"{path} is larger than {MAX_BYTES} bytes")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from error
    values = _parse(text, path)
    if not isinstance(values, dict):
        raise typer.BadParameter(f"{path} holds no options; expected lines such as `max-tokens: 64`")
    return values


def _parse(text: str, path: Path) -> Any:
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except ValueError as error:  # also an integer of 5,000 digits
            raise typer.BadParameter(f"{path} is not valid TOML: {error}") from error
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise typer.BadParameter(f"{path}: expected a name ending in .yaml, .yml, .json or .toml")
    import yaml  # type: ignore[import-untyped, unused-ignore]

    try:
        return yaml.safe_load(text) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{path} is not valid YAML: {error}") from error


def _options(context: typer.Context, values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the options by parameter name: the command's own section if the file has sections, else the whole file."""
    name = context.info_name or ""
    if isinstance(values.get(name), dict):
        values = values[name]
    options_by_name = {str(each.name): each for each in context.command.params if each.name not in ("config", "help")}
    options = {str(key).replace("-", "_"): value for key, value in values.items()}
    if unknown := sorted(options.keys() - options_by_name.keys()):
        accepted = ", ".join(sorted(key.replace("_", "-") for key in options_by_name))
        raise typer.BadParameter(
            f"{path}: {unknown[0].replace('_', '-')!r} is not an option here; there are {accepted}"
        )
    return {name: _fit(options_by_name[name], value, path) for name, value in options.items()}


def _fit(parameter: Any, value: Any, path: Path) -> Any:
    """Convert a value of the file to its option's: one value for a repeatable option is a list of one; a flag is no
    number.

    A value that no option takes is refused here, since versions of typer fail on it in different ways.
    """
    if isinstance(value, bool) and not getattr(parameter, "is_flag", False):
        name = str(parameter.name).replace("_", "-")
        raise typer.BadParameter(
            f"{path}: {name}: {str(value).lower()} is not accepted; expected a value, not a switch"
        )
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, int | float) and not (math.isfinite(one) if isinstance(one, float) else abs(one) < 2**64):
            name = str(parameter.name).replace("_", "-")
            raise typer.BadParameter(
                f"{path}: {name}: {short_repr(one)} is not accepted; expected a number within bounds"
            )
    repeated = getattr(parameter, "multiple", False) or parameter.nargs == -1
    return [value] if repeated and not isinstance(value, list) else value


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=_load,
        help="Options from a YAML, JSON or TOML file; flags win over it.",
    ),
]
