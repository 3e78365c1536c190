"""Reader of `repeat_penalty` of llama.cpp and Ollama, and of the window of tokens that it counts.

On those servers a token that occurs among the last `repeat_last_n` of prompt and output (-1: all, 0: none, default 64)
has its logit divided by the penalty if the logit is above 0, and multiplied otherwise; presence and frequency penalties
count within the same window. Motley's `repetition_penalty` is the same formula over prompt and output as a whole, and
the other two count the output. So -1 is supported for the first, and 0 for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....request_errors import unsupported_field
from .field_schemas import INT32
from .json_body import invalid_value, take_field

WINDOWS = (-1, 64)  # -1: all tokens; 64: the default of those servers, which has no effect without a penalty
NEWLINES = ("penalize_nl", "penalize_newline")
_COUNTED = ("presence_penalty", "frequency_penalty")


def read_repetition_penalty(body: dict[str, Any], sampling: dict[str, Any]) -> dict[str, str]:
    """Set `repetition_penalty` in `sampling` if these fields ask for one. Returns the client's name for it, for errors.

    Raises InvalidRequest naming the field whose effect is not supported.
    """
    penalty, window = body.get("repeat_penalty"), _window(body)
    if penalty is not None and body.get("repetition_penalty") not in (None, penalty):
        raise invalid_value("repeat_penalty", penalty, "no value beside repetition_penalty")
    if window not in (None, 64):
        _check_counted(body, window)
    if window == 0:
        if body.get("repetition_penalty") not in (None, 1):
            raise invalid_value("repeat_last_n", window, "no value beside repetition_penalty")
        penalty = 1.0
    else:
        _check_window(penalty, window)
    if penalty is not None:
        sampling["repetition_penalty"] = penalty
    _check_newlines(body, sampling)
    return {} if body.get("repeat_penalty") is None else {"repetition_penalty": "repeat_penalty"}


def _check_window(penalty: Any, window: int | None) -> None:
    """Raise InvalidRequest unless this penalty can be had with this window. SamplingParams checks the penalty's
    range.
    """
    has_effect = penalty is not None and penalty != 1
    if has_effect and window is None and not isinstance(penalty, str | bool | list | dict):
        raise unsupported_field("repeat_penalty", "give repeat_last_n: -1, since all of the text counts here", penalty)
    if (window not in (None, *WINDOWS) and penalty != 1) or (has_effect and window == 64):
        raise unsupported_field("repeat_last_n", "give -1, since all of the text counts here", window)


def _window(body: dict[str, Any]) -> int | None:
    if body.get("repeat_last_n") is None:
        return None
    window = take_field(body, "repeat_last_n", int, 0)
    if not -1 <= window <= INT32:
        raise invalid_value("repeat_last_n", window, f"an integer from -1 to {INT32}")
    return window


def _check_counted(body: Mapping[str, Any], window: int | None) -> None:
    for name in _COUNTED:
        if body.get(name) not in (None, 0):
            raise unsupported_field("repeat_last_n", f"leave it out: {name} counts the output", window)


def _check_newlines(body: dict[str, Any], sampling: Mapping[str, Any]) -> None:
    """Raise InvalidRequest if newlines are to be exempt from a penalty: that is supported only if nothing is
    penalised.
    """
    none = {"repetition_penalty": 1}
    penalised = any(sampling.get(name) not in (None, none.get(name, 0)) for name in ("repetition_penalty", *_COUNTED))
    for name in NEWLINES:
        if penalised and not take_field(body, name, bool, True):
            raise unsupported_field(name, "newlines are penalised as all tokens are", False)
        take_field(body, name, bool, True)
