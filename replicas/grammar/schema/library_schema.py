"""Rewording of a checked schema for the grammar library (xgrammar 0.2.9).

Nothing unchecked is passed on: only the known keywords of each schema, and references lead to definitions under
Motley's own names, as the library reads neither numbers nor escapes nor empty names in a pointer. The rule of a string
goes through the library as a name (text_rules.py), and `oneOf` as `anyOf` once its schemas are known to exclude one
another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..regex.string_formats import (
    FORMAT_PATTERNS,
    INTEGER_FORMATS,
    LIBRARY_FORMATS,
    MIN_FORMAT_LENGTHS,
    NARROWED_PATTERNS,
)
from ..regex.text_rules import TextRule
from .discriminator import discriminator_properties
from .finite_values import MAX_LISTS, finite_values, unique_lists
from .impossible_schemas import ImpossibleSchemas
from .keywords import (
    ANNOTATION_KEYWORDS,
    IMPLIED_TYPES,
    KEYWORDS,
    LISTED_SCHEMAS,
    NAMING_KEYWORDS,
    NUMBER_BOUNDS,
    SCHEMAS_BY_NAME,
    SINGLE_SCHEMAS,
    TYPE_KEYWORDS,
    WHOLE_KEYWORDS,
    SchemaRefused,
    format_path,
    implied_types,
    integer_bounds,
    is_neutral,
)
from .one_of import DisjointnessProof
from .references import SchemaPath, SchemaReferences

_DISTINGUISHING_KEY = "x-which"  # a number by which the library distinguishes schemas that it would take for the same
MAX_MULTIPLES = 1024
_LENGTHS = ("minLength", "maxLength")


class LibrarySchemaWriter:
    """Schemas of one document by their places, each of which grammar_keywords.check_node has accepted."""

    def __init__(self, schemas: Mapping[SchemaPath, Any], references: SchemaReferences) -> None:
        self._schemas = schemas
        self._references = references
        self._tags = _possible_tags(schemas, references)
        self._impossible = ImpossibleSchemas(schemas, references, self._tags)
        self._disjoint = DisjointnessProof(schemas, references, self._tags)
        self._said: dict[SchemaPath, Any] = {}  # reworded schemas, each made once though it may be a definition as well
        self._names: dict[SchemaPath, str] = {}  # names of definitions
        self._named: list[SchemaPath] = []
        self._marks = 0

    def document(self) -> Any:
        """Return the whole document in the library's words. Raises SchemaRefused if what schemas say together cannot
        be kept to.
        """
        root = self._schema(())
        definitions = {self._names[place]: self._schema(place) for place in self._named}  # each may name more
        return {**root, "$defs": definitions} if definitions else root

    def _schema(self, place: SchemaPath) -> Any:
        if place not in self._said:
            node = self._schemas[place]
            try:
                self._impossible.check(place)
                self._said[place] = node if isinstance(node, bool) else self._keywords(node, place)
            except SchemaRefused as refused:
                refused.place = place if refused.place is None else refused.place
                raise
        return self._said[place]

    def _keywords(self, node: dict[str, Any], place: SchemaPath) -> dict[str, Any]:
        own = {key: value for key, value in node.items() if key in KEYWORDS and not is_neutral(node, key)}
        for keyword in own:
            if keyword in SCHEMAS_BY_NAME:
                names = ((name, (*place, keyword, name)) for name in own[keyword])
                own[keyword] = {name: self._schema(at) for name, at in names if not self._impossible.is_forbidden(at)}
            elif keyword == "prefixItems":
                own[keyword] = [self._inner((*place, keyword, str(index))) for index in range(len(own[keyword]))]
            elif keyword in LISTED_SCHEMAS:
                options = ((*place, keyword, str(index)) for index in range(len(own[keyword])))
                own[keyword] = [self._schema(at) for at in options if not self._impossible.is_forbidden(at)]
            elif keyword in SINGLE_SCHEMAS and keyword != "propertyNames":
                own[keyword] = self._inner((*place, keyword))
        if own.keys().isdisjoint(WHOLE_KEYWORDS):
            return self._of_types(own, place)
        if "$ref" in own:
            own["$ref"] = self._reference(self._references.place(own["$ref"]))
        if "oneOf" in own:
            self._disjoint.check(place)
            own["anyOf"] = own.pop("oneOf")
        return self._distinguished(own)

    def _inner(self, place: SchemaPath) -> Any:
        """Return the schema at that place, or False if it lets in no value."""
        return False if self._impossible.is_forbidden(place) else self._schema(place)

    def _of_types(self, own: dict[str, Any], place: SchemaPath) -> dict[str, Any]:
        """Return the schema as a choice of its types, each as if it stood alone with its own keywords.

        Wherever anything stands beside their type, or leads to them, the library takes lists and objects of which
        nothing is said for empty ones.
        """
        given = own.get("type", implied_types(own))
        names = [given] if isinstance(given, str) else list(dict.fromkeys(given))
        if own.keys() <= {"type"} and set(names).isdisjoint(IMPLIED_TYPES):
            return own
        if "number" in names:
            names = [name for name in names if name != "integer"]
        options = [
            self._of_type({"type": name} | {key: own[key] for key in TYPE_KEYWORDS[name] if key in own}, place)
            for name in names
        ]
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _of_type(self, own: dict[str, Any], place: SchemaPath) -> dict[str, Any]:
        path = format_path(place)
        match own["type"]:
            case "object":
                self._reword_object(own, place)
            case "array":
                _reword_items(own)
                if own.pop("uniqueItems", False):
                    own = self._unique(own, place)
            case "string":
                _reword_text(own, path)
            case "integer":
                _reword_integer(own, path)
            case "number":
                own.pop("format", None)
        return self._distinguished(own)

    def _distinguished(self, own: dict[str, Any]) -> dict[str, Any]:
        if _may_be_mistaken(own):
            self._marks += 1
            own[_DISTINGUISHING_KEY] = self._marks
        return own

    def _reword_object(self, own: dict[str, Any], place: SchemaPath) -> None:
        if tags := self._tags.get(place):
            own["required"] = list(dict.fromkeys([*own.get("required", ()), *tags]))
        if own.keys().isdisjoint(NAMING_KEYWORDS):
            own["additionalProperties"] = True
        self._reword_names(own, place)
        listed, lower = len(own.get("properties", ())), own.get("minProperties", 0)
        if lower > listed and own.get("additionalProperties", False) is False:
            raise SchemaRefused(
                f"{format_path(place)}: 'minProperties' is {lower}, and there are {listed} names for that",
                drops=["minProperties"],
                instead={"minProperties": listed} if listed else {},
            )

    def _reference(self, place: SchemaPath) -> str:
        if not place:
            return "#"
        if place not in self._names:
            self._names[place] = str(len(self._named))
            self._named.append(place)
        return f"#/$defs/{self._names[place]}"

    def _unique(self, own: dict[str, Any], place: SchemaPath) -> dict[str, Any]:
        """Return the lists of distinct items of a finite set as an enum: in any order while there are few."""
        if own.get("maxItems", 2) <= 1:
            return own
        lists = None
        if "items" in self._schemas[place] and "prefixItems" not in own:
            items = (*place, "items")
            values = finite_values(items, self._schemas, self._references)
            values = _few_integers(self._references.follow(items)) if values is None else values
            lists = None if values is None else unique_lists(values, own.get("minItems", 0), own.get("maxItems"))
        if not lists:
            raise SchemaRefused(
                f"{format_path(place)}: 'uniqueItems' is supported for lists "
                "of at most one item, and for items of an enum "
                "of few values or of integers between two bounds; that others differ cannot be kept to. Take the "
                "keyword out of the schema to have lists in which one may come twice",
                drops=["uniqueItems"],
            )
        return {"enum": lists}

    def _reword_names(self, own: dict[str, Any], place: SchemaPath) -> None:
        """Set the rule for the names of other properties: none of the schema's own names, escaped or not."""
        patterns = own.pop("patternProperties", {})
        if self._schemas[place].get("patternProperties"):
            own.pop("propertyNames", None)
            own["additionalProperties"] = False
            for pattern, own["additionalProperties"] in patterns.items():  # one at most
                own["propertyNames"] = {"pattern": TextRule(pattern).encoded()}
        elif "propertyNames" in own:
            del own["propertyNames"]
            self._hold_names(own, (*place, "propertyNames"))
        elif (named := self._schemas[place].get("properties")) and own.get("additionalProperties", False) is not False:
            own["propertyNames"] = {"pattern": TextRule(other_than=tuple(named)).encoded()}
        if own.get("additionalProperties", False) is not False:
            _check_different(own, format_path(place))

    def _hold_names(self, own: dict[str, Any], place: SchemaPath) -> None:
        others = own.setdefault("additionalProperties", True)  # a schema of names implies that there may be properties
        node = self._references.follow(place)
        values = finite_values(place, self._schemas, self._references)
        if self._impossible.is_forbidden(place):
            own["additionalProperties"] = others = False
        if others is False or node is True:
            return
        if values is not None:
            names = [value for value in values if isinstance(value, str)]
            own |= {"properties": dict.fromkeys(names, others), "additionalProperties": False}
            return
        keywords = {key: value for key, value in node.items() if key in KEYWORDS} if isinstance(node, dict) else None
        if (
            keywords is None
            or keywords.pop("type", "string") != "string"
            or not keywords.keys() <= {*TYPE_KEYWORDS["string"]}
        ):
            raise SchemaRefused(f"{format_path(place)}: expected a schema of strings", drops=["propertyNames"])
        try:
            rule = read_text_rule({"type": "string", **keywords}, format_path(place), as_name=True)
        except SchemaRefused as refused:
            if self._references.end(place) == place:
                refused.place = place
            else:  # others may refer to it too, and need not lose its format
                refused.drops = ("propertyNames",)
            raise
        if rule is not None:
            own["propertyNames"] = {"pattern": rule.encoded()}


def _possible_tags(
    schemas: Mapping[SchemaPath, Any], references: SchemaReferences
) -> dict[SchemaPath, tuple[str, ...]]:
    """Return the properties that discriminators have written, without those that would then hold themselves without
    end.
    """
    tags = discriminator_properties(schemas, references)
    if not tags:
        return tags
    impossible = ImpossibleSchemas(schemas, references, tags)
    return {
        place: tuple(name for name in names if not impossible.is_impossible((*place, "properties", name)))
        for place, names in tags.items()
    }


def _reword_items(own: dict[str, Any]) -> None:
    """Adapt lists to the library: it refuses items beyond a list's length, takes what is not said of items for
    nothing, and does not know `true` and `false` in `prefixItems`.
    """
    first = own.pop("prefixItems", [])[: own.get("maxItems")]
    if False in first:
        first, own["items"] = first[: first.index(False)], False
    if first:
        own["prefixItems"] = [{} if schema is True else schema for schema in first]
        if own.get("maxItems") == len(first):
            own.pop("items", None)
            return
    own.setdefault("items", True)


def _check_different(own: dict[str, Any], path: str) -> None:
    """Raise SchemaRefused if `minProperties` needs several names that the schema does not list: one of them may come
    twice and then counts as two, so that only one is sure.
    """
    sure = len(set(own.get("required", ()))) + 1
    if own.get("minProperties", 0) > sure:
        raise SchemaRefused(
            f"{path}: 'minProperties' of more than {sure} is not supported here: that names differ which the schema "
            "does not list cannot be kept to",
            drops=["minProperties"],
            instead={"minProperties": sure},
        )


def read_text_rule(own: dict[str, Any], path: str, *, as_name: bool = False) -> TextRule | None:
    """Return what the keywords of a string say together; None: nothing, or it is a format of the library."""
    lower, upper = own.get("minLength", 0), own.get("maxLength")
    form = own.get("format")
    if form in LIBRARY_FORMATS:
        if upper is None and lower <= MIN_FORMAT_LENGTHS[form] and not as_name:
            return None
        if form not in NARROWED_PATTERNS:
            raise SchemaRefused(
                f"{path}: format {form!r} beside lengths, or of names, is not supported", drops=["format"]
            )
    form = form if form in FORMAT_PATTERNS or form in NARROWED_PATTERNS else None
    rule = TextRule(own.get("pattern"), lower, upper, form)
    return None if rule == TextRule() else rule


def _reword_text(own: dict[str, Any], path: str) -> None:
    rule = read_text_rule(own, path)
    for keyword in _LENGTHS:
        own.pop(keyword, None)
    if rule is not None or own.get("format") not in LIBRARY_FORMATS:
        own.pop("format", None)
    if rule is not None:
        own["pattern"] = rule.encoded()


def _reword_integer(own: dict[str, Any], path: str) -> None:
    """Replace an integer's bounds and format by bounds that are whole numbers, as the library takes no others here."""
    limits = INTEGER_FORMATS.get(own.pop("format", ""))
    lower, upper = integer_bounds(own, 0)
    if limits is not None:
        lower = limits[0] if lower is None else max(limits[0], lower)
        upper = limits[1] if upper is None else min(limits[1], upper)
        if lower > upper:
            raise SchemaRefused(f"{path}: no integer of its format lies within its bounds", drops=["format"])
    for keyword in NUMBER_BOUNDS:
        own.pop(keyword, None)
    own |= {key: value for key, value in (("minimum", lower), ("maximum", upper)) if value is not None}
    if "multipleOf" in own and (lower is not None or upper is not None):
        _reword_multiples(own, lower, upper, path)


def _reword_multiples(own: dict[str, Any], lower: int | None, upper: int | None, path: str) -> None:
    """Name the multiples within two bounds instead, as the library ignores either the bounds or the step."""
    step = own["multipleOf"]
    if lower is None or upper is None or (upper - lower) // step >= MAX_MULTIPLES:
        why = f"{path}: 'multipleOf' beside bounds is supported for at most {MAX_MULTIPLES} values, between two bounds"
        raise SchemaRefused(why, drops=["multipleOf"])
    values = list(range(-(-lower // step) * step, upper + 1, step))
    if not values:
        raise SchemaRefused(f"{path}: no multiple of {step} lies within its bounds", drops=["multipleOf"])
    own.clear()
    own["enum"] = values


def _few_integers(node: Any) -> list[int] | None:
    """Return the integers between two bounds, while there may be few enough lists of them; else None."""
    if not isinstance(node, dict) or node.get("type") != "integer" or "format" in node:
        return None
    lower, upper = integer_bounds(node, 0)
    if lower is None or upper is None or upper - lower >= MAX_LISTS:
        return None
    return [value for value in range(lower, upper + 1) if value % node.get("multipleOf", 1) == 0]


def _may_be_mistaken(node: dict[str, Any]) -> bool:
    """Return whether the library may take the schema for another one, and make one rule of both.

    It distinguishes schemas by their text without annotations, with names sorted and not escaped. So it ignores
    properties whose names are annotations too, and those within a constant, and loses the properties' order.
    """
    names = list(node.get("properties", ()))
    if names != sorted(names) or any(map(_is_lost, names)):
        return True
    values = [node.get("const"), node.get("enum")]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            if any(map(_is_lost, value)):
                return True
            values += value.values()
        elif isinstance(value, list):
            values += value
    return False


def _is_lost(name: str) -> bool:
    return name in ANNOTATION_KEYWORDS or '"' in name
