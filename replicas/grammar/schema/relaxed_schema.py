"""Loosening of a schema, so that everything in it that can be kept to is kept: for tools and formats that are not
`strict`.

Only the keyword that cannot be kept is dropped, at its place; a required property stays required, whatever is known
about it. That a pattern with its lengths is too much shows only when its automaton is made, so it is made here already,
with bounded effort. Where the effort does not suffice, the lengths are dropped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from ..regex.text_rules import TextRule, TextRuleFault, find_text_rule_fault, follows_pattern
from .all_of import merge_schemas
from .choice_keywords import CHOICE_KEYWORDS, distribute_keywords
from .finite_values import within_bounds
from .keywords import (
    KEYWORDS,
    LISTED_SCHEMAS,
    NAMING_KEYWORDS,
    SCHEMAS_BY_NAME,
    SINGLE_SCHEMAS,
    TYPE_KEYWORDS,
    WHOLE_KEYWORDS,
    SchemaRefused,
    check_node,
    format_path,
)
from .library_schema import read_text_rule
from .named_targets import DEFINITIONS, NamedTargets, at_pointer, name_targets
from .references import SchemaPath
from .schema_check import MAX_DEPTH, MAX_NODES, to_library_schema
from .schema_dialects import allow_null, in_json_schema, is_nullable

MAX_MERGED = 8  # most references and schemas of allOf within one another
MAX_COPIED = 16_384  # most values that are copied for the schemas of allOf
MAX_CHOSEN = 256  # most schemas of choices that have keywords beside them
MAX_NESTED = 4  # most such choices within one another
MAX_REPAIRS = 64  # most repairs of faults that show only when all schemas are seen together

MAX_RELAXING_STEPS = 240_000  # most effort for the automata of one document: about a second

# Keywords of a string that are dropped for a fault, in this order; the first that helps is taken.
_TEXTS = {
    TextRuleFault.LARGE: [("maxLength",), ("minLength",), ("minLength", "maxLength")],
    TextRuleFault.EMPTY: [("minLength",), ("maxLength",), ("minLength", "maxLength")],
}
_FORMS = [("pattern",), ("format",), ("pattern", "format")]


def relax_schema(schema: dict[str, Any]) -> tuple[Any, list[str]]:
    """Return the schema in the grammar library's words, and what was dropped to get there, each with its place."""
    try:
        named = name_targets(schema, MAX_NODES)
        found = _relaxed(named)
        if found is None and named.places:  # the further definitions may be what is too much
            found = _relaxed(NamedTargets(schema, {}))
    except RecursionError:
        found = None
    return _property_names_only(schema) if found is None else found


def _relaxed(named: NamedTargets) -> tuple[Any, list[str]] | None:
    loose = _SchemaRelaxer(named)
    relaxed = _repaired(loose.schema(copy.deepcopy(named.schema), (), 0), loose)
    return None if relaxed is None else (relaxed, list(loose.dropped))


def _repaired(root: Any, loose: _SchemaRelaxer) -> Any:
    """Return the words of the whole document, without keywords that fail only there. None: too many would have to be
    dropped.
    """
    for _ in range(MAX_REPAIRS):
        try:
            return to_library_schema(root)
        except SchemaRefused as refused:
            if not _repair(root, refused):
                break
            loose.note(refused.place or (), *refused.drops)
    return None


class _SchemaRelaxer:
    """Walk over one schema document that drops what cannot be kept to. dropped: what was dropped so far, in order."""

    def __init__(self, named: NamedTargets) -> None:
        self._root = named.schema
        self._places = named.places
        self._faults: dict[TextRule, TextRuleFault | None] = {}
        self.dropped: dict[str, None] = {}
        self._count = 0
        self._copied = 0
        self._effort = 0
        self._chosen = 0

    def note(self, place: SchemaPath, *what: str) -> None:
        if place[:2] in self._places:
            place = (*self._places[place[:2]], *place[2:])
        self.dropped |= dict.fromkeys(f"{format_path(place)}: {keyword!r}" for keyword in what)

    def schema(self, node: Any, place: SchemaPath, depth: int) -> Any:
        self._count += 1
        if not isinstance(node, dict | bool) or depth > MAX_DEPTH or self._count > MAX_NODES:
            self.note(place, "the schema")
            return True
        if isinstance(node, bool):
            return node
        node = in_json_schema(node)
        may_be_null = is_nullable(node)
        if may_be_null:
            del node["nullable"]
        node, lost = self._merged(node)
        node, more = distribute_keywords(node, self._of_choice, may_nest=_choices_around(place) < MAX_NESTED)
        self.note(place, *lost, *more)
        node = self._own(within_bounds(node), place)
        self._inner(node, place, depth)
        return allow_null(node) if may_be_null else node

    def _plain(self, part: Any, depth: int) -> tuple[dict[str, Any], list[str]] | None:
        """Return the schema, or the one it refers to in the same document, without `$ref` and `allOf`; and what it
        lost. None: that is impossible.
        """
        while isinstance(part, dict) and isinstance(target := part.get("$ref"), str) and depth < MAX_MERGED:
            if not part.keys().isdisjoint(KEYWORDS - {"$ref"}):
                return None
            depth += 1
            part = at_pointer(self._root, target)
        if isinstance(part, bool):
            return ({}, []) if part else None
        if not isinstance(part, dict) or depth >= MAX_MERGED or not self._may_copy(part):
            return None
        part, lost = self._merged(in_json_schema(copy.deepcopy(part)), depth + 1)
        return (part, lost) if part.keys().isdisjoint({"$ref", "allOf"}) else None

    def _of_choice(self, part: Any) -> tuple[dict[str, Any], list[str]] | None:
        """Return the plain schema as `_plain` does, up to MAX_CHOSEN times; then None."""
        self._chosen += 1
        return self._plain(part, 0) if self._chosen <= MAX_CHOSEN else None

    def _may_copy(self, schema: Any) -> bool:
        """Return whether the schema may be copied: merged schemas refer to the same schemas again and again, so copies
        are limited.
        """
        left = [schema]
        while left and self._copied < MAX_COPIED:
            value = left.pop()
            self._copied += 1
            left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return not left

    def _merged(self, node: dict[str, Any], depth: int = 0) -> tuple[dict[str, Any], list[str]]:
        """Return the schema merged with its reference, if keywords stand beside that, and with several plain schemas of
        `allOf`; and the keywords that were lost.
        """
        parts = node.get("allOf")
        both, lost = self._with_referred({key: value for key, value in node.items() if key != "allOf"}, parts, depth)
        alone = node.keys().isdisjoint(KEYWORDS - {"allOf"})
        if not isinstance(parts, list) or not parts or (alone and len(parts) == 1):
            return both | {"allOf": parts} if "allOf" in node else both, lost
        choices: list[Any] = []
        for index, part in enumerate(parts):
            plain = self._plain(part, depth)
            if plain is None or not (both.keys().isdisjoint(KEYWORDS) or self._may_copy(both)):
                lost.append(f"allOf/{index}")
                choices.append(part)
                continue
            both, more = merge_schemas(both, plain[0])
            lost += [*plain[1], *(f"allOf/{index}/{keyword}" for keyword in more)]
        if len(choices) == 1 and both.keys().isdisjoint(KEYWORDS):  # all other parts say nothing
            return {**both, "allOf": choices}, []
        return both, lost

    def _with_referred(self, node: dict[str, Any], parts: Any, depth: int) -> tuple[dict[str, Any], list[str]]:
        """Return the schema merged with what its reference refers to, if that is plain and keywords or `parts` stand
        beside it; and the keywords that were lost.
        """
        reference = {"$ref": node.get("$ref")}
        beside = (node.keys() & KEYWORDS) - {"$ref", *DEFINITIONS}
        if not isinstance(reference["$ref"], str) or not (beside or parts):
            return node, []
        plain = self._plain(reference, depth)
        if plain is None:
            return node, []
        both, more = merge_schemas({key: value for key, value in node.items() if key != "$ref"}, plain[0])
        return both, [*plain[1], *(f"$ref/{keyword}" for keyword in more)]

    def _own(self, node: dict[str, Any], place: SchemaPath) -> dict[str, Any]:
        """Return the schema without its own keywords that cannot be kept to, whatever the schemas within it are."""
        for keyword in sorted({*DEFINITIONS} & node.keys()):
            if not isinstance(node[keyword], dict):
                del node[keyword]
                self.note(place, keyword)
        for _ in range(len(node) + 1):
            self.note(place, *_list_required(node, self._matches))
            try:
                check_node(node, format_path(place))
            except SchemaRefused as refused:
                drops = [keyword for keyword in refused.drops if keyword in node]
                if not drops:
                    break
                self.note(place, *drops)
                for keyword in drops:
                    del node[keyword]
                node |= refused.instead
            else:
                return self._with_texts(node, place)
        self.note(place, *node)
        return {}

    def _with_texts(self, node: dict[str, Any], place: SchemaPath) -> dict[str, Any]:
        """Return the schema without what its automata cannot express: for its own text, and for the names of its
        properties.
        """
        fault = self._fault(node)
        if fault is not None:
            ways = [way for way in _TEXTS[fault] + _FORMS if node.keys() >= {*way}]
            without = ({key: value for key, value in node.items() if key not in way} for way in ways)
            at, node = next(
                ((way, left) for way, left in zip(ways, without, strict=True) if self._fault(left) is None),
                (("the schema",), {}),
            )
            self.note(place, *at)
        patterns, names = node.get("patternProperties", {}), tuple(node.get("properties", ()))
        if patterns and self._fault_of(TextRule(next(iter(patterns)))) is not None:
            self.note(place, "patternProperties")
            node = {key: value for key, value in node.items() if key != "patternProperties"}
        others = node.get("additionalProperties", False) is not False
        if names and others and self._fault_of(TextRule(other_than=names)) is not None:
            self.note(place, "additionalProperties")
            node["additionalProperties"] = False
        return node

    def _fault(self, node: dict[str, Any]) -> TextRuleFault | None:
        types = node.get("type", "string")
        if types != "string" and "string" not in types:
            return None
        try:
            rule = read_text_rule(node, "")
        except SchemaRefused:  # a format that has no lengths
            return TextRuleFault.LARGE
        return None if rule is None else self._fault_of(rule)

    def _fault_of(self, rule: TextRule) -> TextRuleFault | None:
        """Return what is wrong with a rule. Once the document's effort is spent, every rule that needs an automaton
        counts as too large.
        """
        if rule in self._faults:
            return self._faults[rule]
        if self._effort > MAX_RELAXING_STEPS and not rule.is_counted():
            return TextRuleFault.LARGE
        self._faults[rule], effort = find_text_rule_fault(rule)
        self._effort += effort
        return self._faults[rule]

    def _matches(self, pattern: str, name: str) -> bool:
        """Return whether the name follows the pattern; False too if that takes more effort than there is."""
        if self._effort > MAX_RELAXING_STEPS:
            return False
        found, effort = follows_pattern(pattern, name)
        self._effort += effort
        return found

    def _inner(self, node: dict[str, Any], place: SchemaPath, depth: int) -> None:
        for keyword in SCHEMAS_BY_NAME:
            for name, inner in node.get(keyword, {}).items():
                node[keyword][name] = self.schema(inner, (*place, keyword, name), depth + 1)
        for keyword in LISTED_SCHEMAS:
            for index, inner in enumerate(node.get(keyword, [])):
                node[keyword][index] = self.schema(inner, (*place, keyword, str(index)), depth + 1)
        names = node.get("propertyNames")
        if isinstance(names, dict) and names.keys().isdisjoint(WHOLE_KEYWORDS):  # names are text, said or not
            node["propertyNames"] = {"type": "string", **names}
        for keyword in SINGLE_SCHEMAS:
            if keyword in node:
                node[keyword] = self.schema(node[keyword], (*place, keyword), depth + 1)


def _choices_around(place: SchemaPath) -> int:
    """Return how many choices, each directly within the next, are around the schema at this place."""
    return next(
        (count for count, keyword in enumerate(place[-2::-2]) if keyword not in CHOICE_KEYWORDS), len(place) // 2
    )


def _repair(root: Any, refused: SchemaRefused) -> bool:
    """Drop what was refused, if it is found; return whether it was."""
    node = root
    for part in refused.place or ():
        node = node[int(part)] if isinstance(node, list) else node.get(part) if isinstance(node, dict) else None
    drops = [keyword for keyword in refused.drops if isinstance(node, dict) and keyword in node]
    for keyword in drops:
        value = node.pop(keyword)
        if keyword == "oneOf":
            node["anyOf"] = value
    if drops:
        node |= refused.instead
    return bool(drops)


def _list_required(node: dict[str, Any], matches: Callable[[str, str], bool]) -> list[str]:
    """Make properties that are required and not described into described ones: as the patterns that they follow say, as
    all others are, or of any value. Returns the keywords that this drops.
    """
    required, properties = node.get("required"), node.get("properties", {})
    if not isinstance(required, list) or not isinstance(properties, dict):
        return []
    names = [name for name in required if isinstance(name, str)]
    node["required"] = names
    unknown = [name for name in names if name not in properties]
    others = node.get("additionalProperties", True)
    rest = others if isinstance(others, dict) else True
    if unknown and node.keys().isdisjoint(NAMING_KEYWORDS):
        node["additionalProperties"] = True  # nothing is said about any property
    if unknown:
        patterns = node.get("patternProperties")
        patterns = patterns if isinstance(patterns, dict) else {}
        described = {}
        for name in unknown:
            said = [inner for pattern, inner in patterns.items() if matches(pattern, name)]
            described[name] = copy.deepcopy(said[0] if len(said) == 1 else {"allOf": said} if said else rest)
        node["properties"] = {**properties, **described}
    return ["additionalProperties"] if unknown and others is False else []


def _property_names_only(schema: dict[str, Any]) -> tuple[Any, list[str]]:
    """Return, like `relax_schema`, an object with the names of its properties alone, or any value if the schema is not
    surely of an object.
    """
    if not _says_object(schema):
        return to_library_schema({}), ["#: the schema"]
    return to_library_schema(_names_alone(schema)), ["#: all but the names of its properties"]


def _says_object(schema: dict[str, Any]) -> bool:
    """Return whether the schema allows only objects, as far as its own keywords show."""
    if schema.get("nullable") is True:
        return False
    if "type" in schema:
        return schema["type"] in ("object", ["object"])
    others = schema.keys().isdisjoint({*WHOLE_KEYWORDS, *TYPE_KEYWORDS["array"]})
    implied = others and not schema.keys().isdisjoint(TYPE_KEYWORDS["object"])
    return implied or isinstance(schema.get("properties"), dict)


def _names_alone(schema: dict[str, Any]) -> dict[str, Any]:
    properties, required = schema.get("properties"), schema.get("required")
    names = [name for name in properties if isinstance(name, str)] if isinstance(properties, dict) else []
    wanted = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    property_names = list(dict.fromkeys([*names, *wanted]))[: MAX_NODES // 2]
    return {
        "type": "object",
        "properties": dict.fromkeys(property_names, True),
        "required": [name for name in wanted if name in property_names],
        "additionalProperties": not property_names,
    }
