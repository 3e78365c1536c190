"""Numbers that KServe's clients send as text, in the forms that Python's `str` has for a number: samples for Triton's
vLLM backend, which converts what it gets, send "0.1" and "1e-05".
"""

from __future__ import annotations

import re
from typing import Any

NUMBERS = frozenset(
    ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
     "n", "logprobs", "prompt_logprobs", "min_tokens", "max_tokens", "end_id", "priority", "timeout")
)  # fmt: skip
INTEGER = "-?[0-9]{1,19}"
DECIMAL = r"-?([0-9]{1,19}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][-+]?[0-9]{1,2})?"
_INTEGER, _DECIMAL = re.compile(INTEGER), re.compile(DECIMAL)


def number_of(name: str, value: Any) -> Any:
    """Return the number that a text says, if the parameter is one; anything else as it is."""
    return number_in_text(value) if name in NUMBERS else value


def number_in_text(value: Any) -> Any:
    """Return the number that a text says; anything else, and any other text, as it is."""
    if not isinstance(value, str):
        return value
    if _INTEGER.fullmatch(value):
        return int(value)
    return float(value) if _DECIMAL.fullmatch(value) else value
