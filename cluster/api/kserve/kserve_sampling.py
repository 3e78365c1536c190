"""Reader of KServe's sampling parameters: those of the request, and those that Triton's vLLM backend takes together as
`sampling_parameters`, a JSON object or its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ....replicas.errors import InvalidRequest
from ....replicas.grammar.grammar_spec import GrammarSpec
from ....replicas.sampling_params import SamplingParams
from ....replicas.strict_json import DuplicateName, parse_strict_json
from ..common.fields.constraints import CONSTRAINTS, read_constraint
from ..common.fields.field_schemas import CONSTRAINT_FIELDS
from ..common.fields.foreign_fields import is_unbounded
from ..common.fields.json_body import check_json_values, invalid_value, parse_json_object
from ..common.fields.unknown_fields import UnknownFieldPolicy, is_empty_value
from .kserve_parameters import asks_for_logprobs, is_item, own_parameter_name

__all__ = ["KNOWN", "SAMPLING", "SAMPLING_PARAMETERS", "SamplingReader", "constraint_bytes", "number_of", "read_object"]

SAMPLING_PARAMETERS = "sampling_parameters"
SAMPLING = frozenset(field.name for field in fields(SamplingParams)) - {"grammar"}
KNOWN = SAMPLING | set(CONSTRAINTS)
_CONSTRAINED = tuple({*CONSTRAINTS, *CONSTRAINT_FIELDS})
# A parameter cannot hold a list or an object, so clients send these as JSON text.
_LIST = ((list,), "a JSON list")
_JSON: Mapping[str, tuple[tuple[type, ...], str]] = {
    "stop_token_ids": _LIST,
    "allowed_token_ids": _LIST,
    "bad_words": _LIST,
    "choice": _LIST,
    "logit_bias": ((dict, list), "a JSON object, or a JSON list of pairs,"),
}
_NUMBERS = frozenset(
    ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
     "n", "logprobs", "prompt_logprobs", "min_tokens", "max_tokens")
)  # fmt: skip
_INTEGER = re.compile(r"-?[0-9]{1,19}")
_DECIMAL = re.compile(r"-?[0-9]{1,19}\.[0-9]{1,19}")


def read_object(value: Any, path: str) -> Mapping[str, Any]:
    """Return the fields of `sampling_parameters`, an object or its text; those that are null are left out.

    Raises InvalidRequest naming `path`.
    """
    if is_empty_value(value):
        return {}
    if isinstance(value, str):
        check_json_values(path, value)
        value = parse_json_object(value, path, path)
    if not isinstance(value, dict):
        raise invalid_value(path, value, "a JSON object, or its text")
    return {name: one for name, one in value.items() if one is not None}


def number_of(name: str, value: Any) -> Any:
    """Return the number that a text says, where the parameter is one: samples for Triton's vLLM backend, which
    converts them, send "0.1". Anything else is returned as it is.
    """
    if name not in _NUMBERS or not isinstance(value, str):
        return value
    if _INTEGER.fullmatch(value):
        return int(value)
    return float(value) if _DECIMAL.fullmatch(value) else value


def constraint_bytes(values: Mapping[str, Any]) -> int:
    """Return about how many bytes the constraints among these parameters have."""
    given = [values.get(name) for name in _CONSTRAINED]
    together = values.get(SAMPLING_PARAMETERS)
    together = json.dumps(together) if isinstance(together, dict) else together
    if isinstance(together, str) and any(name in together for name in _CONSTRAINED):
        given.append(together)
    return sum(len(value) for value in given if isinstance(value, str))


class SamplingReader:
    """Sampling parameters of one request, from several groups, of which none may contradict another.

    given  values by SamplingParams' names
    names  the client's name for each, for errors
    """

    def __init__(self, unknown: UnknownFieldPolicy) -> None:
        self.given: dict[str, Any] = {}
        self.names: dict[str, str] = {name: f"parameters.{name}" for name in SAMPLING}
        self._unknown = unknown

    def take(self, group: Mapping[str, Any], prefix: str, *, as_json: bool = False) -> None:
        """Take the parameters of a group. prefix: of their names in errors. as_json: lists and objects need not be
        text. Raises InvalidRequest naming the parameter.
        """
        earlier = frozenset(self.given)
        for theirs, value in group.items():
            path = f"{prefix}{theirs[:80]}"
            name = own_parameter_name(theirs, value, path, KNOWN, self._unknown)
            if name is not None:
                self._take(name, theirs, number_of(name, value), group, prefix, as_json, earlier)

    def _take(
        self, name: str, theirs: str, value: Any, group: Mapping[str, Any], prefix: str, as_json: bool,
        earlier: frozenset[str],
    ) -> None:  # fmt: skip
        path = f"{prefix}{theirs}"
        if not isinstance(value, bool | int | float | str) and not (as_json and _may_be_json(name, value)):
            raise invalid_value(path, value, "a number, a string, true or false")
        if name == "max_tokens" and is_unbounded(value):
            return
        if asks_for_logprobs(theirs, value, path):
            value = self.given.get(name, number_of(name, group.get(name, 0)))  # as many alternatives as are asked for
        beside = number_of(name, group.get(name, value))
        if name != theirs and beside != value and not (name == "max_tokens" and is_unbounded(beside)):
            raise invalid_value(path, value, f"no value beside {name}")
        if is_item(theirs):
            value = [value]
        elif name in _JSON:
            value = _from_json(name, value, path, as_json)
        if name in CONSTRAINTS:
            self._constrain(name, value, path, self.given.get("grammar") if "grammar" in earlier else None)
        elif name not in self.given or (name == theirs and name not in earlier):
            self.given[name], self.names[name] = value, path
        elif self.given[name] != value:
            raise invalid_value(path, value, f"no value beside {self.names[name].removeprefix(prefix)}")

    def _constrain(self, name: str, value: Any, field: str, earlier: GrammarSpec | None) -> None:
        """Take a constraint. earlier: that of a group before, which may be the same."""
        grammar = read_constraint(name, value, field)
        if grammar and earlier and (grammar.kind, grammar.source) == (earlier.kind, earlier.source):
            return
        if grammar is not None and "grammar" in self.given:
            raise InvalidRequest(f"{field}: give one of {', '.join(CONSTRAINTS)}", param=field, code="invalid_value")
        if grammar is not None:
            self.given["grammar"] = grammar


def _may_be_json(name: str, value: Any) -> bool:
    return isinstance(value, list | dict) and (name in _JSON or name in CONSTRAINTS or name == "stop")


def _from_json(name: str, value: Any, path: str, as_json: bool) -> Any:
    kinds, words = _JSON[name]
    if as_json and isinstance(value, kinds):
        return value
    if isinstance(value, str):
        check_json_values(path, value)
    try:
        found = parse_strict_json(value) if isinstance(value, str) else None
    except DuplicateName as error:
        raise invalid_value(path, value, f"each name once; {error}") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, kinds):
        raise invalid_value(path, value, f"{words} as a string")
    return found
