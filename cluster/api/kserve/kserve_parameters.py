"""Parameters of KServe's requests that are other servers' or unknown, and what becomes of each.

The table of OpenAI's routes decides as it does for a completion; parameters of Triton's own stand below.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ...request_errors import unsupported_field
from ..common.fields.constraints import CONSTRAINTS
from ..common.fields.field_schemas import CONSTRAINT_FIELDS
from ..common.fields.field_table import COMPLETION, BodyField, fields_by_name
from ..common.fields.foreign_fields import FOREIGN_FIELDS, FieldEffect
from ..common.fields.json_body import check_fields, invalid_value
from ..common.fields.unknown_fields import UnknownFieldPolicy, is_empty_value

__all__ = ["asks_for_logprobs", "is_item", "own_parameter_name"]

_FOREIGN = {one.name: one for one in FOREIGN_FIELDS if not one.at and "completion" in one.routes}
_COMPLETIONS = fields_by_name(COMPLETION)
_SEQUENCES = frozenset(("sequence_id", "sequence_start", "sequence_end"))  # parameters for Triton's stateful models
_FOR_THE_LOG = frozenset(("metadata", "prompt_cache_key", "safety_identifier"))  # fields that change no answer
_CONSTRAINTS = {"json": "json_schema"} | {name: name for name in CONSTRAINTS}


def own_parameter_name(
    name: str, value: Any, path: str, known: Collection[str], unknown: UnknownFieldPolicy
) -> str | None:
    """Return Motley's name of the parameter `name`, one of `known`; None if it asks for nothing or is ignored.

    `path` is the client's name for errors. Raises InvalidRequest for one that would change the answer but is not
    supported.
    """
    if name in known:
        return name
    foreign, field = _FOREIGN.get(name), _COMPLETIONS.get(name)
    if foreign is None and field is None and name not in _SEQUENCES:
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
    if foreign is not None and foreign.is_neutral(value):
        return None
    if foreign is None or foreign.effect in (FieldEffect.WORKS, FieldEffect.SPREAD):
        raise unsupported_field(path, "/v1/completions has it")
    if value in foreign.unbounded or foreign.effect is FieldEffect.CHANGES_NOTHING:
        return None
    if foreign.effect is FieldEffect.REFUSED:
        raise unsupported_field(path, foreign.why, value if foreign.neutral else None)
    return own_parameter_name(foreign.why, value, path, known, unknown)


def is_item(name: str) -> bool:
    """Return whether the parameter is another name of a list, but holds one item of it."""
    return name in _FOREIGN and _FOREIGN[name].is_item


def asks_for_logprobs(name: str, value: Any, path: str) -> bool:
    """Return whether the parameter asks for log-probabilities by true alone, as `return_log_probs` of TensorRT-LLM.

    Raises InvalidRequest for another value of such a one.
    """
    foreign = _FOREIGN.get(name)
    if foreign is None or foreign.why != "logprobs" or foreign.neutral != (False,):
        return False
    if value is not True:
        raise invalid_value(path, value, "true or false")
    return True


def _changes_nothing(field: BodyField, value: Any) -> bool:
    values = (*field.only, field.schema["default"]) if "default" in field.schema else field.only
    return any(type(value) is type(one) and value == one for one in values)
