"""Constraints on the text of an answer, by vLLM's names, which other servers took over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .....replicas.errors import InvalidRequest
from .....replicas.grammar.grammar_spec import GrammarSpec

_MAKE: Mapping[str, Callable[..., GrammarSpec]] = {
    "json": GrammarSpec.json_schema,
    "json_schema": GrammarSpec.json_schema,
    "regex": GrammarSpec.regex,
    "grammar": GrammarSpec.ebnf,
    "structural_tag": GrammarSpec.structural_tag,
    "choice": GrammarSpec.choice,
}
_JSON = (str | dict, "a text or an object")
_TYPES: Mapping[str, tuple[Any, str]] = {
    "json": _JSON,
    "json_schema": _JSON,
    "structural_tag": _JSON,
    "choice": (list, "a list of strings"),
    "json_object": (bool, "true or false"),
}
CONSTRAINTS = ("json_object", "json_schema", "regex", "grammar", "structural_tag", "choice")


def read_constraint(name: str, value: Any, field: str) -> GrammarSpec | None:
    """Return the grammar of a constraint; None when `json_object` is false, which asks for free text. Raises
    InvalidRequest naming `field`.
    """
    kind, expected = _TYPES.get(name, (str, "a text"))
    if not isinstance(value, kind):
        raise InvalidRequest(f"{field}: expected {expected}", param=field, code="invalid_value")
    if value == "":
        raise InvalidRequest(f"{field}: it is empty", param=field, code="invalid_grammar")
    if name == "json_object":
        return GrammarSpec.json_object(field=field) if value else None
    return _MAKE[name](value, field=field)
