"""Parameters of KServe's requests that are other servers' or unknown, and what becomes of each.

The table of OpenAI's routes decides as it does for a completion; parameters of Triton's own stand below.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..errors import unsupported_field
from ..unknown_fields import UnknownFields, says_nothing
from .constraints import CONSTRAINTS
from .foreign_fields import FOREIGN, Effect
from .openai_fields import check_fields
from .openai_schemas import CONSTRAINT_FIELDS
from .openai_table import COMPLETION, Field, by_name

__all__ = ["is_item", "ours"]

_FOREIGN = {one.name: one for one in FOREIGN if not one.at and "completion" in one.routes}
_COMPLETIONS = by_name(COMPLETION)
_SEQUENCES = frozenset(("sequence_id", "sequence_start", "sequence_end"))  # parameters for Triton's stateful models
_FOR_THE_LOG = frozenset(("metadata", "prompt_cache_key", "safety_identifier"))  # fields that change no answer
_CONSTRAINTS = {"json": "json_schema"} | {name: name for name in CONSTRAINTS}


def ours(name: str, value: Any, path: str, known: Collection[str], unknown: UnknownFields) -> str | None:
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
    if says_nothing(value) or (name in _SEQUENCES and value in (0, False)):
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
    if foreign is None or foreign.effect in (Effect.WORKS, Effect.SPREAD):
        raise unsupported_field(path, "/v1/completions has it")
    if value in foreign.unbounded or foreign.effect is Effect.CHANGES_NOTHING:
        return None
    if foreign.effect is Effect.REFUSED:
        raise unsupported_field(path, foreign.why, value if foreign.neutral else None)
    return ours(foreign.why, value, path, known, unknown)


def is_item(name: str) -> bool:
    """Return whether the parameter is another name of a list, but holds one item of it."""
    return name in _FOREIGN and _FOREIGN[name].is_item


def _changes_nothing(field: Field, value: Any) -> bool:
    values = (*field.only, field.schema["default"]) if "default" in field.schema else field.only
    return any(type(value) is type(one) and value == one for one in values)
