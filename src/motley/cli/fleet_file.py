"""A fleet file in place of a model: its settings, beside the flags of `motley serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ..cluster.fleet.spec.serve_options import ServeOptions

# Options of the command itself, not of what is served.
_OF_THE_COMMAND = {
    "model",
    "config",
    "greet",
    "ready_file",
    "log_format",
    "keep_logs",
    "address",
    "control",
    "admin_host",
    "admin_port",
}
_NAMES = {"cors_origin": "cors_origins", "weights_root": "weights_roots"}


def is_fleet_file(model: str) -> bool:
    """Return whether the argument names a fleet file; no model has such a name."""
    return model.endswith((".yaml", ".yml")) and not Path(model).is_dir()


def options_with_fleet_file(context: typer.Context, options: ServeOptions, path: Path) -> ServeOptions:
    """Return the options with the fleet file. Raises ConfigurationError with the wrong line, or the flag that
    contradicts.
    """
    from ..cluster.fleet.spec.fleet_file_loader import load_fleet
    from ..cluster.fleet.spec.fleet_flags import options_from_fleet

    return options_from_fleet(options, load_fleet(path), dict(_given(context, options)))


def _given(context: typer.Context, options: ServeOptions) -> list[tuple[str, Any]]:
    """Return the options that were given by flags, or by a file of flags."""
    found = []
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if name not in _OF_THE_COMMAND and source is not None and source.name != "DEFAULT":
            field_name = _NAMES.get(name, name)
            found.append((field_name, getattr(options, field_name, value)))
    return found
