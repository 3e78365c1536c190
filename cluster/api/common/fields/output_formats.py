"""Reader of OpenAI's `response_format` and vLLM's `structured_outputs`: converts them to GrammarSpec."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .....replicas.grammar.grammar_spec import GrammarSpec
from .constraints import read_constraint
from .dropped_keywords_log import log_dropped_keywords
from .field_schemas import CONSTRAINT_FIELDS, JSON_SCHEMA_FIELDS, STRUCTURED_FIELDS, STRUCTURED_UNSUPPORTED
from .json_body import invalid_value, missing_field, refuse_other_fields, take_field
from .same_values import is_same_value
from .unknown_fields import is_empty_value

FORMAT_FIELDS = ("response_format", "structured_outputs", "format", *CONSTRAINT_FIELDS)
_EMPTY_IS_NONE = ("format", *CONSTRAINT_FIELDS)
_SCHEMAS = ("schema", "value")  # other names of what `json_schema` holds
_PATTERNS = ("regex", "pattern", "value")  # names of a regular expression
_TGI_KINDS = {"json": "json", "json_object": "json", "json_schema": "json", "regex": "regex"}
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def read_output_format(body: dict[str, Any]) -> GrammarSpec | None:
    """Return the grammar that a body asks for, in `response_format`, `structured_outputs` or a field for one
    constraint; None for free text.

    Raises InvalidRequest naming the field.
    """
    given = [name for name in FORMAT_FIELDS if body.get(name) is not None]
    given = [name for name in given if name not in _EMPTY_IS_NONE or not is_empty_value(body[name])]
    if isinstance(body.get("structured_outputs"), bool):  # OpenRouter's: whether response_format is kept to, as it is
        given.remove("structured_outputs")
    if "response_format" in given and body["response_format"] == {"type": "text"}:
        given.remove("response_format")
    for other in given[1:]:
        if not _say_the_same(body, given[0], other):
            raise invalid_value(other, body[other], f"no value beside {given[0]}")
    if not given:
        return None
    name = given[0]
    if name == "response_format":
        return _response_format(take_field(body, name, dict, {}))
    if name == "structured_outputs":
        return _structured_outputs(take_field(body, name, dict, {}))
    if name == "format":
        return _ollama_format(body[name])
    if name == "grammar" and isinstance(body[name], dict):
        return _tgi_grammar(body[name])
    return read_constraint(CONSTRAINT_FIELDS[name], body[name], name)


def _say_the_same(body: dict[str, Any], one: str, other: str) -> bool:
    """Return whether two fields hold the text to the same form, in the same words."""
    (kind, value), (other_kind, other_value) = (_constraint(name, body[name]) for name in (one, other))
    return kind == other_kind and is_same_value(kind, value, other_value)


def _constraint(name: str, value: Any) -> tuple[str, Any]:
    """Return the kind of constraint that a field sets, and its value; of a field that has several, the one in it."""
    if name == "structured_outputs" and isinstance(value, dict):
        found = [kind for kind in value if value[kind] is not None]
        return (found[0], value[found[0]]) if len(found) == 1 else (name, value)
    return CONSTRAINT_FIELDS.get(name, name), value


def _tgi_grammar(spec: dict[str, Any]) -> GrammarSpec | None:
    """Read TGI's grammar, `{"type": …, "value": …}`."""
    refuse_other_fields(spec, ("type", "value"), path="grammar.")
    kind = spec.get("type")
    if not isinstance(kind, str) or kind not in _TGI_KINDS:
        raise invalid_value("grammar.type", kind, f"one of {', '.join(_TGI_KINDS)}")
    if spec.get("value") is None:
        raise missing_field("grammar.value")
    if kind == "json_schema":
        return _named_schema(take_field(spec, "value", dict, {}, path="grammar."), "grammar.value.")
    return read_constraint(_TGI_KINDS[kind], spec["value"], "grammar.value")


def _named_schema(given: dict[str, Any], path: str) -> GrammarSpec:
    """Read TGI's `{"name": …, "schema": …}`. TGI has no schema that is not enforced."""
    refuse_other_fields(given, ("name", "schema"), path=path)
    _check_name(given, path)
    if given.get("schema") is None:
        raise missing_field(f"{path}schema")
    return GrammarSpec.json_schema(take_field(given, "schema", dict, {}, path=path), field=f"{path}schema")


def _check_name(given: dict[str, Any], path: str) -> str:
    if (name := take_field(given, "name", str, "", path=path)) and not _NAME.fullmatch(name):
        raise invalid_value(f"{path}name", name, "1 to 64 letters, digits, underscores or dashes")
    return name


def _ollama_format(spec: Any) -> GrammarSpec:
    if isinstance(spec, dict):
        return GrammarSpec.json_schema(spec, field="format")
    if spec != "json":
        raise invalid_value("format", spec, "json, or a JSON schema")
    return GrammarSpec.json_object(field="format")


def _response_format(spec: dict[str, Any]) -> GrammarSpec | None:
    kind = spec.get("type")
    if not isinstance(kind, str) or kind not in _RESPONSE_FORMATS:
        raise invalid_value("response_format.type", kind, f"one of {', '.join(_RESPONSE_FORMATS)}")
    return _RESPONSE_FORMATS[kind](spec)


def _text(spec: dict[str, Any]) -> None:
    refuse_other_fields(spec, ("type",), path="response_format.")


def _json_object(spec: dict[str, Any]) -> GrammarSpec:
    """Read a format of type json_object: any object, or one that follows `schema` (llama.cpp and others) or `value`
    (TGI).
    """
    refuse_other_fields(spec, ("type", *_SCHEMAS), path="response_format.")
    name = _one_name(spec, _SCHEMAS)
    schema = spec.get(name)
    if not (name == "value" and isinstance(schema, str)):  # TGI takes the text of a schema too
        schema = take_field(spec, name, dict, {}, path="response_format.")
    if schema:
        return GrammarSpec.json_schema(schema, field=f"response_format.{name}")
    return GrammarSpec.json_object(field="response_format")


def _one_name(spec: dict[str, Any], names: tuple[str, ...]) -> str:
    """Return the name under which a value is given; the first name if there is none. Raises InvalidRequest if there
    are two.
    """
    given = [name for name in names if not is_empty_value(spec.get(name))]
    if len(given) > 1:
        raise invalid_value(f"response_format.{given[1]}", spec[given[1]], f"no value beside {given[0]}")
    return given[0] if given else names[0]


def _json_schema(spec: dict[str, Any]) -> GrammarSpec:
    """Read a format of type json_schema. With `strict`, the schema is enforced or refused; without, as much of it as
    can be enforced. llama.cpp and others have the schema in `schema`.
    """
    value = spec.get("value")
    if spec.get("json_schema") is None and isinstance(value, dict) and isinstance(value.get("schema"), dict):
        refuse_other_fields(spec, ("type", "value"), path="response_format.")
        return _named_schema(value, "response_format.value.")
    if spec.get("json_schema") is None and any(spec.get(name) for name in _SCHEMAS):
        return _json_object(spec)
    refuse_other_fields(spec, ("type", "json_schema"), path="response_format.")
    path = "response_format.json_schema."
    given = take_field(spec, "json_schema", dict, {}, path="response_format.")
    refuse_other_fields(given, JSON_SCHEMA_FIELDS, path=path)
    name = _check_name(given, path)
    take_field(given, "description", str, "", path=path)
    strict = take_field(given, "strict", bool, False, path=path)
    if given.get("schema") is None:
        raise missing_field(f"{path}schema")
    schema = take_field(given, "schema", dict, {}, path=path)
    if strict:
        return GrammarSpec.json_schema(schema, field=f"{path}schema")
    grammar, dropped = GrammarSpec.loose_json_schema(schema, field=f"{path}schema")
    log_dropped_keywords(f"{path}schema" + f" of {name}" * bool(name), dropped)
    return grammar


def _regex(spec: dict[str, Any]) -> GrammarSpec:
    """Read a regular expression from `regex`; TGI has it in `value`, Together in `pattern`."""
    refuse_other_fields(spec, ("type", *_PATTERNS), path="response_format.")
    name = _one_name(spec, _PATTERNS)
    return GrammarSpec.regex(take_field(spec, name, str, "", path="response_format."), field=f"response_format.{name}")


def _ebnf(spec: dict[str, Any]) -> GrammarSpec:
    refuse_other_fields(spec, ("type", "grammar"), path="response_format.")
    text = take_field(spec, "grammar", str, "", path="response_format.")
    return GrammarSpec.ebnf(text, field="response_format.grammar")


def _structural_tag(spec: dict[str, Any]) -> GrammarSpec:
    """Read a structural tag from `format`; older versions of vLLM and SGLang have it in `structures` and `triggers`."""
    older = spec.get("structures") is not None
    refuse_other_fields(
        spec, ("type", "structures", "triggers") if older else ("type", "format"), path="response_format."
    )
    if not older and spec.get("format") is None:
        raise missing_field("response_format.format")
    take_field(spec, "format", dict, {}, path="response_format.")
    return GrammarSpec.structural_tag(spec, field="response_format")


_RESPONSE_FORMATS: dict[str, Callable[[dict[str, Any]], GrammarSpec | None]] = {
    "text": _text,
    "json_object": _json_object,
    "json": _json_object,
    "json_schema": _json_schema,
    "regex": _regex,
    "grammar": _ebnf,
    "structural_tag": _structural_tag,
}


def _structured_outputs(given: dict[str, Any]) -> GrammarSpec | None:
    """Read vLLM's `structured_outputs`: exactly one of json, json_object, regex, choice, grammar and structural_tag."""
    path = "structured_outputs."
    refuse_other_fields(given, STRUCTURED_FIELDS, STRUCTURED_UNSUPPORTED, path=path)
    names = [name for name in STRUCTURED_FIELDS if given.get(name) is not None]
    if len(names) != 1:
        raise invalid_value("structured_outputs", given, f"exactly one of {', '.join(STRUCTURED_FIELDS)}")
    return read_constraint(names[0], given[names[0]], path + names[0])
