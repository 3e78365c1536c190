"""What a text must look like, by the names that vLLM gave the ways to say it and others took over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...replicas.errors import InvalidRequest
from ...replicas.grammar_spec import GrammarSpec

_MAKE: Mapping[str, Callable[..., GrammarSpec]] = {
    "json_schema": GrammarSpec.json_schema,
    "regex": GrammarSpec.regex,
    "grammar": GrammarSpec.ebnf,
    "structural_tag": GrammarSpec.structural_tag,
    "choice": GrammarSpec.choice,
}
CONSTRAINTS = ("json_object", *_MAKE)


def constraint(name: str, value: Any, field: str) -> GrammarSpec | None:
    """`value`: text, for `choice` a list of texts, for `json_object` whether. Raises InvalidRequest naming `field`."""
    wanted = {"json_object": bool, "choice": list}.get(name, str)
    if not isinstance(value, wanted):
        words = {bool: "true or false", list: "a list of strings", str: "a string"}[wanted]
        raise InvalidRequest(f"{field}: expected {words}", param=field, code="invalid_value")
    if name == "json_object":
        return GrammarSpec.json_object(field=field) if value else None
    return _MAKE[name](value, field=field)
