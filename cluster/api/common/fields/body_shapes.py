"""Fields that the objects of a JSON body may have, and which of their values ask for nothing.

Shapes are made from the schemas that describe the interface, and from the table of other servers' fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ....request_errors import unknown_field, unsupported_field
from ....transport.http_server.openapi import Schema
from .empty_values import accepts_value, values_meaning_none
from .foreign_fields import FOREIGN_FIELDS, UNBOUNDED, FieldEffect, ForeignField
from .json_body import invalid_value
from .same_values import agreed_value
from .unknown_fields import ALWAYS_REFUSED, UnknownFieldPolicy, is_empty_value


@dataclass(slots=True)
class BodyShape:
    """Shape of an object in a body, or of a list of objects.

    path       where it stands in the body, without indices
    supported  fields that Motley has: their reader checks their values
    foreign    fields of other servers, and what becomes of each
    empty      known fields whose empty value counts as absent, with these values
    inner      shapes of the fields that are objects or lists of objects
    items      for a list: the shape of its items
    """

    path: str = ""
    supported: frozenset[str] = frozenset()
    foreign: Mapping[str, ForeignField] = field(default_factory=dict)
    empty: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    inner: Mapping[str, BodyShape] = field(default_factory=dict)
    items: BodyShape | None = None


def body_shape(schema: Schema, route: str, path: str = "") -> BodyShape | None:
    """Return the shape of what a schema describes; None if only its reader checks what stands there, such as a JSON
    schema.
    """
    alternatives = list(_alternatives(schema))
    properties: dict[str, list[Schema]] = {}
    required: set[str] = set()
    for one in alternatives:
        if one.get("additionalProperties") is False:
            required.update(one.get("required", ()))
            for name, inner in one["properties"].items():
                properties.setdefault(name, []).append(inner)
    items = [one["items"] for one in alternatives if "items" in one]
    inner = {name: body_shape({"anyOf": found}, route, _join(path, name)) for name, found in properties.items()}
    shape = BodyShape(
        path,
        frozenset(properties),
        _foreign(route, path) if properties else {},
        {
            name: values_meaning_none(_join(path, name), () if name in required else found)
            for name, found in properties.items()
        },
        {name: one for name, one in inner.items() if one is not None},
        body_shape({"anyOf": items}, route, f"{path}[]") if items else None,
    )
    return shape if shape.supported or shape.items is not None else None


def normalize_body(
    body: dict[str, Any], shape: BodyShape, unknown: UnknownFieldPolicy, names: dict[str, str] | None = None
) -> dict[str, Any]:
    """Remove or rename every field of a body that Motley does not have. Changes and returns `body`. Raises
    InvalidRequest naming the field.

    names  receives the client's name of each renamed field, by Motley's name for it: errors are to use that name
    """
    _settle(body, shape, unknown, {} if names is None else names, "")
    return body


def _settle(value: Any, shape: BodyShape, unknown: UnknownFieldPolicy, names: dict[str, str], at: str) -> None:
    if isinstance(value, list):
        if shape.items is not None:
            for index, item in enumerate(value):
                _settle(item, shape.items, unknown, names, f"{at}[{index}]")
    elif isinstance(value, dict):
        for name in [name for name, one in shape.foreign.items() if one.effect is FieldEffect.SPREAD and name in value]:
            _spread(value, name, shape, _join(at, name))
        for name in [name for name in value if name in shape.foreign or name not in shape.supported]:
            _settle_foreign(value, name, shape, unknown, names, _join(at, name))
        for name in [name for name in value if value[name] is None or _is_one_of(value[name], shape.empty[name])]:
            del value[name]
        for name, inner in shape.inner.items():
            if name in value:
                _settle(value[name], inner, unknown, names, _join(at, name))


def _is_one_of(value: Any, empty: tuple[Any, ...]) -> bool:
    return isinstance(value, str | list | dict) and value in empty


def _spread(fields: dict[str, Any], name: str, shape: BodyShape, at: str) -> None:
    """Move the fields of the object in field `name` into the object that holds it."""
    inner = fields.pop(name)
    if is_empty_value(inner):
        return
    if not isinstance(inner, dict):
        raise invalid_value(at, inner, "an object")
    for one, value in inner.items():
        foreign = shape.foreign.get(one)
        if foreign is not None and foreign.effect is FieldEffect.SPREAD:
            raise unknown_field(_join(at, one))
        fields[one] = _of_both(fields.get(one), value, one, shape, _join(at, one))


def _of_both(outer: Any, inner: Any, name: str, shape: BodyShape, at: str) -> Any:
    """Return the value of a field that stands in the body and in the object at `at` within it, or in one of them."""
    foreign = shape.foreign.get(name)
    for one, other in ((outer, inner), (inner, outer)):
        if _is_neutral(one, name, shape) or (foreign is not None and one in foreign.unbounded):
            return one if other is None else other
    agreed = agreed_value(name if foreign is None else foreign.why, outer, inner)
    if agreed is None:
        raise invalid_value(at, inner, f"no value beside {name}")
    return agreed


def _is_neutral(value: Any, name: str, shape: BodyShape) -> bool:
    if name in shape.supported:
        return value is None or _is_one_of(value, shape.empty[name])
    return is_empty_value(value)


def _settle_foreign(
    fields: dict[str, Any], name: str, shape: BodyShape, unknown: UnknownFieldPolicy, names: dict[str, str], at: str
) -> None:
    value, foreign = fields.pop(name), shape.foreign.get(name)
    if foreign is None:
        unknown.meet(_join(shape.path, name), value, at)
    elif is_empty_value(value) or foreign.is_neutral(value) or foreign.effect is FieldEffect.CHANGES_NOTHING:
        return
    elif foreign.effect is FieldEffect.REFUSED:
        raise unsupported_field(at, foreign.why, value if foreign.neutral else None)
    else:
        renamed = _rename(fields, foreign, value, shape, at)
        if renamed and not shape.path:
            names[foreign.why] = at


def _rename(fields: dict[str, Any], foreign: ForeignField, value: Any, shape: BodyShape, at: str) -> bool:
    """Store the value under the name that Motley has for it, which may be in an inner object (`outer.inner`). Returns
    whether no value was there.
    """
    outer, _, inner = foreign.why.partition(".")
    if outer not in shape.supported:
        return False  # this route has no such field, as embeddings have no tokens of an answer
    if inner and fields.get(outer) is None:
        fields[outer] = {}
    if inner:
        fields = fields[outer]
    if not isinstance(fields, dict):
        return False  # not an object: the field's reader refuses it by name
    name = inner or outer
    value = [value] if foreign.is_item else value
    value = UNBOUNDED if value in foreign.unbounded else value
    current = fields.get(name)
    if current is None or (not inner and _is_neutral(current, name, shape)):
        fields[name] = value
        return value is not UNBOUNDED
    agreed = agreed_value(name, current, value)
    if agreed is None:
        raise invalid_value(at, value, f"no value beside {foreign.why}")
    fields[name] = agreed
    return agreed is not current


def open_schema(schema: Schema, route: str, *, foreign: bool = True) -> Schema:
    """Return the schema as the interface's description shows it: with foreign fields, and open to unknown ones.

    Without `foreign`: the schema that holds where unknown fields are refused; the body itself has Motley's own fields
    alone.
    """
    return _opened(schema, body_shape(schema, route), route, foreign)


def _opened(schema: Schema, shape: BodyShape | None, route: str, foreign: bool) -> Schema:
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
        others |= dict.fromkeys(sorted(ALWAYS_REFUSED), refused)
    rest = {key: value for key, value in schema.items() if key != "additionalProperties" or not foreign}
    return {**rest, "properties": {**own, **others}}


def _or_empty(schema: Schema, empty: tuple[Any, ...]) -> Schema:
    """Return the schema extended by the empty values that it does not allow itself."""
    more = [value for value in empty if not accepts_value(schema, value)]
    if not more:
        return schema
    about = {key: schema[key] for key in ("description", "default") if key in schema}
    rest = {key: value for key, value in schema.items() if key not in about}
    if set(rest) == {"enum"}:
        return {"enum": [*rest["enum"], *more], **about}
    if rest == {"type": "null"}:
        return {"enum": [None, *more], **about}
    return {"anyOf": [rest, {"enum": more}], **about}


def _described(foreign: ForeignField, own: Mapping[str, Schema]) -> Schema:
    about = f"{', '.join(foreign.sources)}: {foreign.effect}"
    if foreign.effect is FieldEffect.CHANGES_NOTHING:
        return {"description": f"{about}: {foreign.why}"}
    if foreign.effect is FieldEffect.REFUSED:
        taken = _distinct([None, "", [], {}, *foreign.neutral])
        return {"enum": taken, "description": f"{about} with another value: {foreign.why}"}
    if foreign.effect is FieldEffect.SPREAD:
        about = f"{', '.join(foreign.sources)}: {foreign.effect}, {foreign.why}"
        return {"description": about, "anyOf": [{"type": "object"}, {"enum": ["", [], None]}]}
    schema = own.get(foreign.why, {"type": ["boolean", "null"]})
    if foreign.is_item:
        schema = {"anyOf": [schema["items"], {"type": "null"}]}
    taken = _distinct(["", [], {}, *foreign.neutral, *foreign.unbounded])
    undescribed = {key: value for key, value in schema.items() if key != "description"}
    return {"description": f"{about} {foreign.why}", "anyOf": [undescribed, {"enum": taken}]}


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Return the values without duplicates; 1 and 1.0 are one value of JSON."""
    return list({json.dumps(int(one) if isinstance(one, float) else one): one for one in values}.values())


def _foreign(route: str, path: str) -> dict[str, ForeignField]:
    """Return the foreign fields of the object at `path` by name, without the ones that work under their own name."""
    return {
        one.name: one
        for one in FOREIGN_FIELDS
        if one.at == path and route in one.routes and one.effect is not FieldEffect.WORKS
    }


def _alternatives(schema: Schema) -> Iterable[Schema]:
    if "anyOf" not in schema:
        yield schema
    for one in schema.get("anyOf", ()):
        yield from _alternatives(one)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
