"""Conversion of the flags of `motley serve` to a fleet of one pool, and of fleet files to the options of flags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from ....replicas.engine_config import EngineConfig
from ...prefix_store.redis_source import redact_url
from ...service_errors import ConfigurationError
from .engine_spec import ENGINE_NAMES, EngineSpec
from .fleet_file_loader import DEMO, FleetFile, describe_error
from .fleet_spec import FleetSpec
from .serve_options import ServeOptions
from .yaml_lines import format_path

CPU, GPU = "cpu", "gpu"  # names of the one pool
_OF_SECURITY = (
    "api_keys", "open_health", "open_metrics", "tls_cert", "tls_key", "client_ca", "tls_terminated_upstream"
)  # fmt: skip
_LISTS = {"cors_origins": "cors_origin", "weights_roots": "weights_root"}  # entry of `security` -> its flag
_OF_LISTEN = ("host", "http_port", "grpc_port", "dashboard_port")
_OF_SERVICE = (
    "drain_s", "stall_s", "tool_parser", "reasoning_parser", "unknown_fields", "spare", "vllm_metrics", "otlp_endpoint"
)  # fmt: skip
_OF_PREFIXES = {"prefix_cache": "store", "prefix_memory": "memory", "prefix_secret": "secret"}
_PLACES: dict[str, tuple[str, ...]] = {
    "served_model_name": ("served_model_name",),
    **{name: ("security", name) for name in (*_OF_SECURITY, *_LISTS)},
    **{name: ("listen", name) for name in _OF_LISTEN},
    **{name: ("service", name) for name in (*_OF_SERVICE, "reader_timeout_s")},
    **{name: ("prefix_cache", field) for name, field in _OF_PREFIXES.items()},
}

_FLAG = re.compile(r"--([a-z][a-z-]*)")


def fleet_from_options(options: ServeOptions) -> FleetSpec:
    """Return the fleet of the options' fleet file, or else of one pool. Raises ConfigurationError naming the flag."""
    if options.fleet is not None:
        return options.fleet.spec
    engine = options.engine
    said: dict[str, Any] = {
        "model": options.model or DEMO,
        "served_model_name": options.served_model_name,
        "pools": [
            {
                "name": CPU if engine.device == "cpu" else GPU,
                "replicas": {"min": 0, "max": options.most_replicas, "start": options.replicas},
                "device": engine.device,
                "tensor_parallel": engine.tensor_parallel,
                "pipeline_parallel": engine.pipeline_parallel,
                "pipeline_layers": None if engine.pipeline_layers is None else list(engine.pipeline_layers),
                "simulate": options.simulate,
                "simulate_model": options.simulate_model,
                "quantization": {"cpu_weights": engine.cpu_weights},
                "engine": {name: _engine_value(engine, name) for name in EngineSpec.model_fields},
            }
        ],
        "queue": {"max_wait_s": 0, "hold_s": 30},  # with one pool, requests are refused at once when it is full
        "prefix_cache": {
            "reuse": engine.reuse_prefixes,
            **{field: getattr(options, name) for name, field in _OF_PREFIXES.items()},
        },
        "security": {
            **{name: getattr(options, name) for name in _OF_SECURITY},
            **{name: list(getattr(options, name)) for name in _LISTS},
        },
        "listen": {name: getattr(options, name) for name in _OF_LISTEN},
        "service": {
            **{name: getattr(options, name) for name in _OF_SERVICE},
            "reader_timeout_s": engine.reader_timeout_s,
        },
    }
    try:
        return FleetSpec.model_validate(said)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = tuple(first["loc"])
        flags = {place: name for name, place in _PLACES.items()}
        name = flags.get(tuple(map(str, at)), format_path(at[-1:])).replace("_", "-")
        raise ConfigurationError(
            f"--{name}: {describe_error(first, at)}", param=format_path(at), code="bad_fleet"
        ) from None


def _engine_value(engine: EngineConfig, name: str) -> Any:
    """Return an engine setting as a fleet file has it."""
    value = getattr(engine, ENGINE_NAMES.get(name, name))
    return (list(value) or None) if isinstance(value, tuple) else value


def options_from_fleet(options: ServeOptions, file: FleetFile, given: Mapping[str, Any]) -> ServeOptions:
    """Return the options that a fleet file sets, with flags for what the file leaves open.

    Raises ConfigurationError naming a flag that contradicts the file, or that the file sets for each pool.

    given  values of the flags, by their names in `ServeOptions`, and reader_timeout_s
    """
    spec = file.spec
    for name, value in given.items():
        spec = _overlaid(spec, file, name, value)
    security, listen, service = spec.security, spec.listen, spec.service
    return replace(
        options,
        fleet=replace(file, spec=spec),
        model=None if spec.model == DEMO else spec.model,
        served_model_name=spec.served_model_name,
        engine=replace(options.engine, reader_timeout_s=service.reader_timeout_s),
        cors_origins=tuple(security.cors_origins),
        weights_roots=tuple(security.weights_roots),
        **{name: getattr(security, name) for name in _OF_SECURITY},
        **{name: getattr(listen, name) for name in _OF_LISTEN},
        **{name: getattr(service, name) for name in _OF_SERVICE},
        **{name: getattr(spec.prefix_cache, field) for name, field in _OF_PREFIXES.items()},
    )


def error_in_file(error: ConfigurationError, file: FleetFile | None) -> ConfigurationError:
    """Return an error about a flag as one about a line of the fleet file, if the file has set the value."""
    begins = _FLAG.match(error.message)
    names = ((error.param or "").lstrip("-").replace("-", "_"), _option_name(begins[1]) if begins else "")
    at = next((_PLACES[name] for name in names if file is not None and file.says(*_PLACES.get(name, ("",)))), None)
    if file is None or at is None:
        return error
    said = _FLAG.sub(lambda found: format_path(_PLACES.get(_option_name(found[1]), (found[0],))), error.message)
    return file.lines.error(at, said.removeprefix(format_path(at)).lstrip(": "))


def _option_name(flag: str) -> str:
    """Return the name of a flag in `ServeOptions`."""
    name = flag.replace("-", "_")
    return next((many for many, one in _LISTS.items() if one == name), name)


def _overlaid(spec: FleetSpec, file: FleetFile, name: str, value: Any) -> FleetSpec:
    flag = f"--{_LISTS.get(name, name)}".replace("_", "-")
    if name not in _PLACES:
        message = f"{flag}: {file.lines.path} says that itself, of each pool"
        raise ConfigurationError(message, param=name, code="bad_fleet")
    at = _PLACES[name]
    value = list(value) if isinstance(value, tuple) else value
    found: Any = spec
    for part in at:
        found = getattr(found, part)
    if file.says(*at) and found != value:
        line, column = file.lines.values[at]
        if name == "prefix_cache":
            value, found = redact_url(value), redact_url(found)  # shortened, since they may contain passwords
        message = f"{flag} {value} contradicts {file.lines.path}:{line}:{column}: {format_path(at)} is {found}"
        raise ConfigurationError(message, param=name, code="bad_fleet")
    if len(at) == 1:
        return spec.model_copy(update={name: value})
    section = getattr(spec, at[0])
    return spec.model_copy(update={at[0]: section.model_copy(update={at[1]: value})})
