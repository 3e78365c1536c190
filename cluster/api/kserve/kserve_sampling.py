"""Reader of KServe's sampling parameters: those of the request, and those that Triton's vLLM backend takes together as
`sampling_parameters`, a JSON object or its text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ....replicas.errors import InvalidRequest
from ....replicas.sampling_params import SamplingParams
from ....replicas.strict_json import DuplicateName, parse_strict_json
from ..common.fields.constraints import CONSTRAINTS, read_constraint
from ..common.fields.do_sample import apply_do_sample
from ..common.fields.field_schemas import CONSTRAINT_FIELDS
from ..common.fields.foreign_fields import is_unbounded
from ..common.fields.json_body import check_json_values, invalid_value, parse_json_object
from ..common.fields.same_values import agreed_value
from ..common.fields.unknown_fields import UnknownFieldPolicy, is_empty_value
from .kserve_numbers import number_of
from .kserve_parameters import check_logprobs, is_item, is_neutral, own_parameter_name

SAMPLING_PARAMETERS = "sampling_parameters"
SAMPLING = frozenset(field.name for field in fields(SamplingParams)) - {"grammar"}
DO_SAMPLE = "do_sample"
SUPPORTED = SAMPLING | {*CONSTRAINTS, DO_SAMPLE}
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


def constraint_bytes(values: Mapping[str, Any]) -> int:
    """Return about how many bytes the constraints among these parameters have. An escape may hide one's name."""
    given = [values.get(name) for name in _CONSTRAINED]
    together = values.get(SAMPLING_PARAMETERS)
    together = json.dumps(together) if isinstance(together, dict) else together
    if isinstance(together, str) and any(name in together for name in (*_CONSTRAINED, "\\u")):
        given.append(together)
    return sum(len(value) for value in given if isinstance(value, str))


class SamplingReader:
    """Sampling parameters of one request, from several groups, of which none may contradict another.

    given  values by SamplingParams' names, and `do_sample`
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
        # Of two names for one parameter, errors name the other server's.
        for theirs in sorted(group, key=lambda name: name not in SUPPORTED):
            path, value = f"{prefix}{theirs[:80]}", group[theirs]
            name = own_parameter_name(theirs, value, path, SUPPORTED, self._unknown)
            if name is not None:
                self._take(name, theirs, number_of(theirs if is_item(theirs) else name, value), prefix, as_json)

    def result(self) -> dict[str, Any]:
        """Return the values by SamplingParams' names."""
        sampling = {name: value for name, value in self.given.items() if name != DO_SAMPLE}
        apply_do_sample(self.given.get(DO_SAMPLE), sampling, self.names.get(DO_SAMPLE, DO_SAMPLE))
        if sampling.get("logprobs") is True:
            sampling["logprobs"] = 0
        return sampling

    def keep(self, name: str, value: Any, path: str, said: Any, prefix: str = "") -> None:
        """Keep the value of a parameter, unless the same one is there. Raises InvalidRequest naming `path` and what it
        said if another one is.
        """
        current = self.given.get(name)
        if current is None and name == "max_tokens" and is_unbounded(value):
            return
        agreed = value if current is None else agreed_value(name, current, value)
        if agreed is None:
            raise invalid_value(path, said, f"no value beside {self.names[name].removeprefix(prefix)}")
        if current is None or agreed is not current:
            self.given[name], self.names[name] = agreed, path

    def _take(self, name: str, theirs: str, value: Any, prefix: str, as_json: bool) -> None:
        path = f"{prefix}{theirs}"
        if not isinstance(value, bool | int | float | str) and not (as_json and _may_be_json(name, value)):
            raise invalid_value(path, value, "a number, a string, true or false")
        said = value
        if is_item(theirs):
            value = [value]
        elif name in _JSON:
            value = json_of(name, value, path, as_json=as_json)
        if is_neutral(name, value):
            return
        if name in CONSTRAINTS:
            self._constrain(name, value, path)
        else:
            check_logprobs(theirs, value, path)
            self.keep(name, value, path, said, prefix)

    def _constrain(self, name: str, value: Any, field: str) -> None:
        grammar, earlier = read_constraint(name, value, field), self.given.get("grammar")
        if grammar is None or earlier is None:
            self.given |= {} if grammar is None else {"grammar": grammar}
        elif (grammar.kind, grammar.source) != (earlier.kind, earlier.source):
            raise InvalidRequest(f"{field}: give one of {', '.join(CONSTRAINTS)}", param=field, code="invalid_value")


def _may_be_json(name: str, value: Any) -> bool:
    return isinstance(value, list | dict) and (name in _JSON or name in CONSTRAINTS or name == "stop")


def json_of(name: str, value: Any, path: str, *, as_json: bool) -> Any:
    """Return the list or object that the text of such a parameter holds. as_json: it need not be text. Raises
    InvalidRequest naming `path`.
    """
    kinds, expected = _JSON[name]
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
        raise invalid_value(path, value, f"{expected} as a string")
    return found
