"""Parameters of KServe's requests that are other servers' or unknown, and what becomes of each.

The table of OpenAI's routes decides as it does for a completion; parameters of Triton's own stand below.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ...request_errors import unsupported_field
from ..common.fields.constraints import CONSTRAINTS
from ..common.fields.empty_values import EMPTY, values_meaning_none
from ..common.fields.field_schemas import CONSTRAINT_FIELDS
from ..common.fields.field_table import COMPLETION, BodyField, fields_by_name
from ..common.fields.foreign_fields import FOREIGN_FIELDS, FieldEffect
from ..common.fields.json_body import check_fields, invalid_value
from ..common.fields.unknown_fields import UnknownFieldPolicy, is_empty_value
from .kserve_numbers import number_in_text

NO_WORDS: tuple[Any, ...] = ("", [], [""])  # what clients of Triton's backends send for no words

_FOREIGN = {one.name: one for one in FOREIGN_FIELDS if not one.at and "completion" in one.routes}
_COMPLETIONS = fields_by_name(COMPLETION)
_SEQUENCES = frozenset(("sequence_id", "sequence_start", "sequence_end"))  # parameters for Triton's stateful models
_FOR_THE_LOG = frozenset(("metadata", "prompt_cache_key", "safety_identifier"))  # fields that change no answer
# Lists that are mostly written as text, of which "" is none.
_WRITTEN = ("allowed_token_ids", "choice", "logit_bias", "stop_token_ids")
_NOTHING: dict[str, tuple[Any, ...]] = {
    **{name: EMPTY for name, one in _FOREIGN.items() if one.effect is not FieldEffect.WORKS},
    **{name: values_meaning_none(name, [field.schema]) for name, field in _COMPLETIONS.items()},
    **dict.fromkeys((*_WRITTEN, *(name for name in CONSTRAINTS if name != "json_object")), EMPTY),
    "bad_words": NO_WORDS,
    "logprobs": (False,),
    "response_format": ({"type": "text"},),
    "priority": (0,),
    "timeout": (0,),
}
# What this protocol has for another's field.
_INSTEAD = {
    "priority": "give it beside sampling_parameters",
    "timeout": "give it beside sampling_parameters",
    "timeout_s": "give timeout, in microseconds",
    "request_id": "give id",
    "user": "give id",
    "top_logprobs": "give logprobs",
    **dict.fromkeys(("response_format", "structured_outputs", "format"), f"give one of {', '.join(CONSTRAINTS)}"),
}
_CONSTRAINTS = {"json": "json_schema"} | {name: name for name in CONSTRAINTS}


def own_parameter_name(
    name: str, value: Any, path: str, supported: Collection[str], unknown: UnknownFieldPolicy
) -> str | None:
    """Return Motley's name of the parameter `name`, one of `supported`; None if it asks for nothing or is ignored.

    `path` is the client's name for errors. Raises InvalidRequest for one that would change the answer but is not
    supported.
    """
    if value is None or is_neutral(name, value):
        return None
    foreign, field = _FOREIGN.get(name), _COMPLETIONS.get(name)
    if name in supported:
        return name
    if foreign is None and field is None and name not in _SEQUENCES and name not in _INSTEAD:
        unknown.meet(f"parameters.{name}", value, path)
        return None
    if is_empty_value(value) or (name in _SEQUENCES and value in (0, False)):
        return None
    if name in CONSTRAINT_FIELDS:
        return _CONSTRAINTS[CONSTRAINT_FIELDS[name]]
    if name in _SEQUENCES:
        raise unsupported_field(path, "send the whole conversation: its prefix is found again", value)
    if name in _FOR_THE_LOG or (field is not None and _changes_nothing(field, value)):
        return None
    if field is not None and (field.instead is not None or field.only):
        check_fields({name: value}, _COMPLETIONS, path.removesuffix(name))
    number = number_in_text(value)
    if foreign is not None and (foreign.is_neutral(value) or foreign.is_neutral(number)):
        return None
    if foreign is not None and foreign.effect is FieldEffect.SPREAD:
        raise unsupported_field(path, "give its fields as parameters of their own")
    if foreign is None or foreign.effect is FieldEffect.WORKS:
        raise unsupported_field(path, _INSTEAD.get(name, "/v1/completions has it"))
    if number in foreign.unbounded or foreign.effect is FieldEffect.CHANGES_NOTHING:
        return None
    if foreign.effect is FieldEffect.REFUSED:
        raise unsupported_field(path, foreign.why, value if foreign.neutral else None)
    return own_parameter_name(foreign.why, value, path, supported, unknown)


def is_item(name: str) -> bool:
    """Return whether the parameter is another name of a list, but holds one item of it."""
    return name in _FOREIGN and _FOREIGN[name].is_item


def is_neutral(name: str, value: Any) -> bool:
    """Return whether this value of the parameter, or what its text holds, counts as leaving it out."""
    if name == "stream_options" and isinstance(value, dict):
        return not any(value.values())
    return _is_one_of(value, _NOTHING.get(name, ()))


def values_of_nothing(name: str) -> tuple[Any, ...]:
    """Return the values of the parameter that count as leaving it out, beside null and those that are its default."""
    return _NOTHING.get(name, ())


def check_logprobs(name: str, value: Any, path: str) -> None:
    """Raise InvalidRequest for any value but true of a parameter that asks for log-probabilities by true alone, as
    `return_log_probs` of TensorRT-LLM.
    """
    foreign = _FOREIGN.get(name)
    if foreign is not None and foreign.why == "logprobs" and foreign.is_neutral(False) and value is not True:
        raise invalid_value(path, value, "true or false")


def _changes_nothing(field: BodyField, value: Any) -> bool:
    values = (*field.only, field.schema["default"]) if "default" in field.schema else field.only
    return _is_one_of(value, values) or _is_one_of(number_in_text(value), values)


def _is_one_of(value: Any, values: Collection[Any]) -> bool:
    return any(type(value) is type(one) and value == one for one in values)
