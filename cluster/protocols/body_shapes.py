"""What the objects of a body may have, and a body without what asks for nothing.

Made of the very schemas that describe the interface, and of the table of foreign fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import unknown_field, unsupported_field
from ..unknown_fields import NEVER_TAKEN, UnknownFields, says_nothing
from ..web.openapi import Schema
from .empty_values import empty_is_none, takes
from .foreign_fields import FOREIGN, UNBOUNDED, Effect, Foreign
from .openai_fields import wrong_type

__all__ = ["Shape", "opened", "settle", "shape_of"]


@dataclass(slots=True)
class Shape:
    """An object, or a list of them.

    path     where it stands, without indices
    known    fields that Motley has: whoever reads the body checks their values
    foreign  what becomes of others' fields
    empty    those of the known fields of which an empty value is none, with such values
    inner    shapes of those fields that are objects or lists of objects
    items    of a list: the shape of its items
    """

    path: str = ""
    known: frozenset[str] = frozenset()
    foreign: Mapping[str, Foreign] = field(default_factory=dict)
    empty: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    inner: Mapping[str, Shape] = field(default_factory=dict)
    items: Shape | None = None


def shape_of(schema: Schema, route: str, path: str = "") -> Shape | None:
    """None: whatever stands there is nobody's business but its reader's, as in a JSON schema."""
    alternatives = list(_alternatives(schema))
    properties: dict[str, list[Schema]] = {}
    required: set[str] = set()
    for one in alternatives:
        if one.get("additionalProperties") is False:
            required.update(one.get("required", ()))
            for name, inner in one["properties"].items():
                properties.setdefault(name, []).append(inner)
    items = [one["items"] for one in alternatives if "items" in one]
    inner = {name: shape_of({"anyOf": found}, route, _join(path, name)) for name, found in properties.items()}
    shape = Shape(
        path,
        frozenset(properties),
        _foreign(route, path) if properties else {},
        {
            name: empty_is_none(_join(path, name), () if name in required else found)
            for name, found in properties.items()
        },
        {name: one for name, one in inner.items() if one is not None},
        shape_of({"anyOf": items}, route, f"{path}[]") if items else None,
    )
    return shape if shape.known or shape.items is not None else None


def settle(body: dict[str, Any], shape: Shape, unknown: UnknownFields) -> dict[str, Any]:
    """The same body, with the fields alone that Motley has. Changes it. Raises InvalidRequest naming the field."""
    _settle(body, shape, unknown, "")
    return body


def _settle(value: Any, shape: Shape, unknown: UnknownFields, at: str) -> None:
    if isinstance(value, list):
        if shape.items is not None:
            for index, item in enumerate(value):
                _settle(item, shape.items, unknown, f"{at}[{index}]")
    elif isinstance(value, dict):
        for name in [name for name, one in shape.foreign.items() if one.effect is Effect.SPREAD and name in value]:
            _spread(value, name, shape, _join(at, name))
        for name in [name for name in value if name in shape.foreign or name not in shape.known]:
            _settle_foreign(value, name, shape, unknown, _join(at, name))
        for name in [name for name in value if value[name] is None or _is_one_of(value[name], shape.empty[name])]:
            del value[name]
        for name, inner in shape.inner.items():
            if name in value:
                _settle(value[name], inner, unknown, _join(at, name))


def _is_one_of(value: Any, empty: tuple[Any, ...]) -> bool:
    return isinstance(value, str | list | dict) and value in empty


def _spread(fields: dict[str, Any], name: str, shape: Shape, at: str) -> None:
    """What an object within has, as if it stood beside that."""
    inner = fields.pop(name)
    if says_nothing(inner):
        return
    if not isinstance(inner, dict):
        raise wrong_type(at, inner, "an object")
    for one, value in inner.items():
        foreign = shape.foreign.get(one)
        if foreign is not None and foreign.effect is Effect.SPREAD:
            raise unknown_field(_join(at, one))
        if fields.get(one) is not None and fields[one] != value:
            raise wrong_type(_join(at, one), value, f"no value beside {one}")
        fields[one] = value


def _settle_foreign(fields: dict[str, Any], name: str, shape: Shape, unknown: UnknownFields, at: str) -> None:
    value, foreign = fields.pop(name), shape.foreign.get(name)
    if foreign is None:
        unknown.meet(_join(shape.path, name), value, at)
    elif says_nothing(value) or foreign.is_neutral(value) or foreign.effect is Effect.CHANGES_NOTHING:
        return
    elif foreign.effect is Effect.REFUSED:
        raise unsupported_field(at, foreign.why, value if foreign.neutral else None)
    else:
        _rename(fields, foreign, value, shape, at)


def _rename(fields: dict[str, Any], foreign: Foreign, value: Any, shape: Shape, at: str) -> None:
    """The value under the name that Motley knows, which may be of an object within."""
    outer, _, inner = foreign.why.partition(".")
    if outer not in shape.known:
        return  # such as tokens of an answer that is a vector
    if inner and fields.get(outer) is None:
        fields[outer] = {}
    if inner:
        fields = fields[outer]
    if not isinstance(fields, dict):
        return  # whoever reads it refuses it by name
    name = inner or outer
    value = [value] if foreign.is_item else value
    if value in foreign.unbounded:
        fields[name] = UNBOUNDED if fields.get(name) is None else fields[name]
        return
    if fields.get(name) not in (None, UNBOUNDED) and not _is_same(fields[name], value):
        raise wrong_type(at, value, f"no value beside {foreign.why}")
    fields[name] = value


def _is_same(one: Any, other: Any) -> bool:
    """1 and 1.0 are one value of JSON, 1 and true are two."""
    return one == other and isinstance(one, bool) is isinstance(other, bool)


def opened(schema: Schema, route: str, *, foreign: bool = True) -> Schema:
    """The schema as the interface's description has it: with foreign fields, and open to unknown ones.

    Without `foreign`: as it is where unknown ones are refused, and of the body itself with Motley's own fields alone.
    """
    return _opened(schema, shape_of(schema, route), route, foreign)


def _opened(schema: Schema, shape: Shape | None, route: str, foreign: bool) -> Schema:
    if shape is None:
        return schema
    if "anyOf" in schema:
        return {**schema, "anyOf": [_opened(one, shape, route, foreign) for one in schema["anyOf"]]}
    if "items" in schema:
        return {**schema, "items": _opened(schema["items"], shape.items, route, foreign)}
    if schema.get("additionalProperties") is not False:
        return schema
    required = schema.get("required", ())
    own = {
        name: _or_empty(
            _opened(inner, shape.inner.get(name), route, foreign), () if name in required else shape.empty[name]
        )
        for name, inner in schema["properties"].items()
    }
    path = shape.path
    if not foreign and not path:
        return {**schema, "properties": own}
    others = {name: _described(one, own) for name, one in sorted(_foreign(route, path).items())}
    if not path:
        refused: Schema = {"enum": [None, "", [], {}], "description": "with a value refused: it is the service's"}
        others |= dict.fromkeys(sorted(NEVER_TAKEN), refused)
    rest = {key: value for key, value in schema.items() if key != "additionalProperties" or not foreign}
    return {**rest, "properties": {**own, **others}}


def _or_empty(schema: Schema, empty: tuple[Any, ...]) -> Schema:
    """With those of the empty values that it does not take anyway."""
    more = [value for value in empty if not takes(schema, value)]
    if not more:
        return schema
    about = {key: schema[key] for key in ("description", "default") if key in schema}
    rest = {key: value for key, value in schema.items() if key not in about}
    if set(rest) == {"enum"}:
        return {"enum": [*rest["enum"], *more], **about}
    if rest == {"type": "null"}:
        return {"enum": [None, *more], **about}
    return {"anyOf": [rest, {"enum": more}], **about}


def _described(foreign: Foreign, own: Mapping[str, Schema]) -> Schema:
    about = f"{', '.join(foreign.sources)}: {foreign.effect}"
    if foreign.effect is Effect.CHANGES_NOTHING:
        return {"description": f"{about}: {foreign.why}"}
    if foreign.effect is Effect.REFUSED:
        taken = _distinct([None, "", [], {}, *foreign.neutral])
        return {"enum": taken, "description": f"{about} with another value: {foreign.why}"}
    if foreign.effect is Effect.SPREAD:
        about = f"{', '.join(foreign.sources)}: {foreign.effect}, {foreign.why}"
        return {"description": about, "anyOf": [{"type": "object"}, {"enum": ["", [], None]}]}
    known = own.get(foreign.why, {"type": ["boolean", "null"]})
    if foreign.is_item:
        known = {"anyOf": [known["items"], {"type": "null"}]}
    taken = _distinct(["", [], {}, *foreign.neutral, *foreign.unbounded])
    kept = {key: value for key, value in known.items() if key != "description"}
    return {"description": f"{about} {foreign.why}", "anyOf": [kept, {"enum": taken}]}


def _distinct(values: Iterable[Any]) -> list[Any]:
    """1 and 1.0 are one value of JSON."""
    return list({json.dumps(int(one) if isinstance(one, float) else one): one for one in values}.values())


def _foreign(route: str, path: str) -> dict[str, Foreign]:
    """Those of an object, but for the ones that are honoured under their own name."""
    return {
        one.name: one for one in FOREIGN if one.at == path and route in one.routes and one.effect is not Effect.WORKS
    }


def _alternatives(schema: Schema) -> Iterable[Schema]:
    if "anyOf" not in schema:
        yield schema
    for one in schema.get("anyOf", ()):
        yield from _alternatives(one)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
