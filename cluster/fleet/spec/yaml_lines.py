"""YAML reader that keeps the position of every value, so that errors can name the line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from ....replicas.short_repr import short_repr
from ...service_errors import ConfigurationError

MAX_BYTES = 2**20
MAX_VALUES = 20_000  # bounds what aliases expand to
MAX_DIGITS = 1000  # Python refuses to parse integers of several thousand digits
INTEGER = "tag:yaml.org,2002:int"

ValuePath = tuple[str | int, ...]  # keys and indices, from the outermost: ("pools", 0, "name")


@dataclass(frozen=True, slots=True)
class YamlLines:
    """Positions of the values of a file.

    values  line and column of each value, both counted from 1
    keys    line and column of each value's key
    """

    path: Path
    values: dict[ValuePath, tuple[int, int]] = field(default_factory=dict)
    keys: dict[ValuePath, tuple[int, int]] = field(default_factory=dict)

    def error(self, at: ValuePath, message: str, *, key: bool = False) -> ConfigurationError:
        """Return an error `FILE:LINE:COLUMN: NAME: message`.

        A missing value is placed at the entry that should contain it.
        """
        at = self._named(at)
        line, column = self.keys[at] if key and at in self.keys else self.order(at)
        name = format_path(at)
        text = f"{name}: {message}" if name else message
        return ConfigurationError(f"{self.path}:{line}:{column}: {text}", param=name or None, code="bad_fleet")

    def order(self, at: ValuePath) -> tuple[int, int]:
        """Return the line and column of a value, which sort by position in the file."""
        at = self._named(at)
        while at and at not in self.values:
            at = at[:-1]
        return self.values.get(at, (1, 1))

    def _named(self, at: ValuePath) -> ValuePath:
        """Return a path with its keys as text, whatever type YAML gives them."""
        names: ValuePath = ()
        for part in at:
            names = (*names, part if (*names, part) in self.values else str(part))
        return names


def format_path(at: ValuePath) -> str:
    """Return a path in the form `pools[0].replicas.max`."""
    name = ""
    for part in at:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name


def read_yaml(path: Path) -> tuple[dict[str, Any], YamlLines]:
    """Read a file that contains one mapping. Raises ConfigurationError: no such file, not YAML, a duplicate key."""
    text, lines = _text(path), YamlLines(path)
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        for at, child, key in _walk(node):
            mark = child.start_mark
            lines.values[at] = mark.line + 1, mark.column + 1
            if key is not None:
                lines.keys[at] = key.start_mark.line + 1, key.start_mark.column + 1
            if child.tag == INTEGER and len(child.value) > MAX_DIGITS:
                raise lines.error(
                    at, f"{short_repr(child.value)} is not accepted; expected at most {MAX_DIGITS} digits"
                )
            if len(lines.values) > MAX_VALUES:
                raise ConfigurationError(f"{path}: it holds more than {MAX_VALUES} values", code="bad_fleet")
        whole = loader.construct_document(node) if node is not None else None
    except _DuplicateKey as twice:
        mark, first = twice.key.start_mark, twice.first.start_mark
        lines.values[twice.at] = mark.line + 1, mark.column + 1
        raise lines.error(twice.at, f"it is there twice, first in line {first.line + 1}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}{_place(error)}: it is no YAML: {_problem(error)}", code="bad_fleet") from None
    finally:
        loader.dispose()
    if not isinstance(whole, dict):
        raise lines.error((), f"{short_repr(whole)} is not accepted; expected entries such as `model: demo`")
    return whole, lines


class _DuplicateKey(Exception):
    def __init__(self, at: ValuePath, key: Any, first: Any) -> None:
        self.at, self.key, self.first = at, key, first


def _walk(
    node: Any, at: ValuePath = (), key: Any = None, around: tuple[Any, ...] = ()
) -> Iterator[tuple[ValuePath, Any, Any]]:
    """Yield the path, the node and the key's node of every value. Raises yaml.YAMLError where a value contains
    itself.
    """
    if node is None:
        return
    if any(node is each for each in around):
        raise yaml.composer.ComposerError(None, None, "an alias stands for what it is within", node.start_mark)
    yield at, node, key
    around = (*around, node)
    if isinstance(node, yaml.SequenceNode):
        for number, child in enumerate(node.value):
            yield from _walk(child, (*at, number), None, around)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, Any] = {}
        for name, value in node.value:
            if name.tag == "tag:yaml.org,2002:merge":
                yield from _walk_merged(value, at, {str(each.value) for each, _ in node.value}, around)
                continue
            text = str(name.value)
            if text in seen:
                raise _DuplicateKey((*at, text), name, seen[text])
            seen[text] = name
            yield from _walk(value, (*at, text), name, around)


def _walk_merged(
    node: Any, at: ValuePath, given: set[str], around: tuple[Any, ...]
) -> Iterator[tuple[ValuePath, Any, Any]]:
    """Yield what a merge key (`<<: *other`) adds to a mapping: the entries that the mapping does not have itself."""
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    for each in nodes:
        if isinstance(each, yaml.MappingNode):
            own = [(name, value) for name, value in each.value if str(name.value) not in given]
            for name, value in own:
                yield from _walk(value, (*at, str(name.value)), name, around)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigurationError(f"{path}: it is larger than {MAX_BYTES} bytes", code="bad_fleet")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
        raise ConfigurationError(f"{path}: it cannot be read: {reason}", code="bad_fleet") from None


def _place(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"


def _problem(error: Exception) -> str:
    return " ".join(str(getattr(error, "problem", None) or error).split())[:200]
