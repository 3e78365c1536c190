"""Writes docs/api.md, and the pages of docs/reference that follow from the code: commands, the fleet file, the metrics.

`make reference` runs this; a test fails when a page is out of date. What docs/api.md has is in the package
api_reference beside this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from api_reference import http_codes, reference_page
from api_reference.markdown_table import table

from motley.cli.app import app
from motley.cluster.fleet.spec.fleet_schema import fleet_schema
from motley.cluster.metrics.metrics_table import METRICS

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
WRITTEN = "Written by `make reference` from the code; edit that."
PREFIX = "motley_"


def pages() -> dict[Path, str]:
    """File -> the text that it is to have."""
    texts = {"cli.md": command_line(), "fleet-file.md": fleet_file(), "metrics.md": metrics()}
    return {FOLDER / name: text for name, text in texts.items()}


# The command line.


def command_line() -> str:
    """Return a section for each command, with what `--help` tells."""
    root = typer.main.get_command(app)
    parts = [
        "# Command line",
        WRITTEN,
        "Every option can also come from a file: `--config FILE` takes a YAML, JSON or TOML file with lines such as "
        "`http-port: 8080`. Flags win over the file, and the file over defaults. `motley COMMAND --help` tells the "
        "same as this page. Exit statuses are 0, 1 for a failure, 2 for a command that was called wrongly, and 130 for "
        "Ctrl-C; [failures](../operate/failures.md#exit-statuses) has those of `motley serve`.",
        *(part for name, command in _commands(root, "motley") for part in _command(name, command)),
    ]
    return "\n\n".join(parts) + "\n"


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield f"{path} {name}", command
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")


def _command(name: str, command: Any) -> Iterator[str]:
    yield f"{'#' * (1 + name.count(' '))} {name}"
    text, examples = _help(command.help or "")
    yield from text
    if examples:
        yield "```sh\n" + "\n".join(examples) + "\n```"
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and one.name != "help"]
    if arguments:
        yield table(
            ("argument", "default", "meaning"), ((_code(one.metavar or one.name), *_said(one)) for one in arguments)
        )
    if options and not hasattr(command, "commands"):
        yield table(("option", "default", "meaning"), ((_option(one), *_said(one)) for one in options))


def _help(text: str) -> tuple[list[str], list[str]]:
    """Paragraphs on one line each, and the lines of the examples."""
    before, _, after = text.replace("\b\n", "").partition("Examples:\n")
    paragraphs = [re.sub(r"\s+", " ", part).strip() for part in before.split("\n\n")]
    return [_plain(part) for part in paragraphs if part], [
        re.sub(r"(?<=\S) {3,}(?=\S)", "  # ", line.strip()) for line in after.split("\n") if line.strip()
    ]


def _option(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if option.is_flag:
        return names
    return f"{names[:-1]} {option.metavar}`" if option.metavar else names


def _said(parameter: Any) -> tuple[str, str]:
    """Its default and its meaning."""
    default = parameter.default
    if default is True and parameter.secondary_opts:
        default = parameter.opts[0]
    plain = callable(default) or not isinstance(default, str | int | float) or default in ("", False)
    bounds = _bounds(parameter)
    meaning = _plain(" ".join((parameter.help or "").split()))
    return "" if plain else _code(str(default)), f"{meaning} ({bounds})" if bounds else meaning


def _bounds(parameter: Any) -> str:
    """Newer releases of typer keep them in the parameter, older ones in its type."""
    kind = parameter if hasattr(parameter, "min") else parameter.type
    minimum, maximum = getattr(kind, "min", None), getattr(kind, "max", None)
    if minimum is not None and maximum is not None:
        return f"{minimum:g} to {maximum:g}" if isinstance(maximum, float) else f"{minimum} to {maximum}"
    return f"at least {minimum:g}" if minimum else ""


# The fleet file.


def fleet_file() -> str:
    """Return a section for each object of a fleet file, with its keys."""
    whole = fleet_schema()
    objects: dict[str, Any] = whole["$defs"]
    parts = [
        "# The fleet file",
        WRITTEN,
        "YAML or JSON. [Fleets](../guides/fleets.md) explains it with examples; editors complete it by "
        "[fleet.schema.json](../../deploy/fleet.schema.json). Sizes are numbers of bytes or texts such as `10GiB`.",
        "## The file",
        _keys(whole, objects),
    ]
    for name in _in_order(whole):
        one = _object(objects[name])
        parts += [f"## {_title(name)}", _plain(_meaning(one, objects)), _keys(one, objects)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _in_order(whole: Mapping[str, Any]) -> list[str]:
    """Objects by where the file has them, each before those within it."""
    found: list[str] = []

    def collect(one: Mapping[str, Any]) -> None:
        for name in re.findall(r'"#/\$defs/(\w+)"', json.dumps(_object(one).get("properties", {}))):
            if name not in found:
                found.append(name)
                collect(whole["$defs"][name])

    collect(whole)
    return found


def _object(one: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object, of what may be a number or an object."""
    return next((each for each in one.get("anyOf", ()) if each.get("type") == "object"), one)


def _title(name: str) -> str:
    words = re.findall(r"[A-Z][a-z]*", name.removesuffix("Spec"))
    return " ".join(words).capitalize()


def _keys(one: Mapping[str, Any], objects: Mapping[str, Any]) -> str:
    needed = one.get("required", ())
    rows = [
        (f"`{key}`", _type(value), "needed" if key in needed else _default(value), _plain(_meaning(value, objects)))
        for key, value in one.get("properties", {}).items()
    ]
    return table(("key", "value", "default", "meaning"), rows) if rows else ""


def _meaning(value: Mapping[str, Any], objects: Mapping[str, Any]) -> str:
    """Its own, else that of the one object that it may be."""
    named = re.findall(r'"#/\$defs/(\w+)"', json.dumps(value))
    description = value.get("description") or (objects[named[0]].get("description", "") if len(named) == 1 else "")
    return " ".join(description.split())


def _default(value: Mapping[str, Any]) -> str:
    default = value.get("default")
    return "" if default is None or isinstance(default, dict | list) else _code(json.dumps(default).strip('"'))


def _type(value: Mapping[str, Any]) -> str:
    if "$ref" in value:
        title = _title(value["$ref"].rsplit("/", 1)[1])
        return f"[{title.lower()}](#{title.lower().replace(' ', '-')})"
    if "anyOf" in value or "oneOf" in value:
        kinds = [_type(one) for one in value.get("anyOf", value.get("oneOf", ())) if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in value:
        return " or ".join(_code(str(one)) for one in value["enum"])
    if "const" in value:
        return _code(str(value["const"]))
    if value.get("type") == "array":
        return f"list of {_type(value.get('items', {}))}"
    if value.get("type") == "object":
        inner = value.get("additionalProperties") or next(iter(value.get("patternProperties", {}).values()), None)
        return f"names with {_type(inner)}" if isinstance(inner, dict) else "object"
    return _scalar(value)


def _scalar(value: Mapping[str, Any]) -> str:
    kinds = value.get("type", "any")
    words = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
    kind = " or ".join(words.get(one, one) for one in ([kinds] if isinstance(kinds, str) else kinds))
    minimum, maximum = value.get("minimum", value.get("exclusiveMinimum")), value.get("maximum")
    if minimum is not None and maximum is not None:
        return f"{kind}, {'above ' if 'exclusiveMinimum' in value else ''}{minimum:g} to {_number(maximum)}"
    return f"{kind}, from {minimum:g}" if minimum is not None else kind


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}".replace("e+0", "e")


# The metrics.


def metrics() -> str:
    """Return all names that Prometheus sees, with what they count."""
    parts = [
        "# Metrics",
        WRITTEN,
        "`GET /metrics` has these. [Metrics and health](../operate/metrics.md) says which to watch, and what labels "
        "they have beside their own. A figure that a replica does not have, such as those of a prefix store where "
        "there is none, is absent and not zero; all others are there from the start.",
        "## Gauges",
        _metric_table("gauge"),
        "## Counters",
        _metric_table("counter", "_total"),
        "## Histograms",
        "Each is told as `…_bucket` with `le`, `…_sum` and `…_count`.",
        _metric_table("histogram"),
    ]
    return "\n\n".join(parts) + "\n"


def _metric_table(kind: str, suffix: str = "") -> str:
    found = [each for each in METRICS.values() if each.kind == kind]
    labelled = any(each.labels for each in found)
    rows = [
        (f"`{PREFIX}{each.name}{suffix}`", *[", ".join(map(_code, each.labels))] * labelled, each.description)
        for each in found
    ]
    return table(("name", *["labels"] * labelled, "meaning"), rows)


# Text.


def _code(text: str) -> str:
    return f"`{text}`"


def _plain(text: str) -> str:
    """Text that Markdown takes as it is: what looks like an option, a name or a URL's beginning is code."""
    pattern = r"(`[^`]+`)|((?<![\w`])--?[a-z][\w-]*|\b\w+://|\b[a-z]+(?:_[a-z0-9]+)+\b)"
    return re.sub(pattern, lambda match: match[1] or f"`{match[2]}`", text).replace("<", "&lt;").replace("*", "\\*")


def write() -> list[Path]:
    """Write all of them anew. The error codes of HTTP come first, for docs/api.md tells of them."""
    written = [http_codes.write()]
    for path, text in {**pages(), reference_page.PAGE: reference_page.write_reference()}.items():
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


if __name__ == "__main__":
    for path in write():
        print(f"written: {path.relative_to(ROOT)}")
