"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

from .errors import InvalidRequest
from .short_repr import short_repr

MAX_SIZE = 2**53  # 8 PiB: more than any machine has, and exact as a float

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str) -> int:
    """Return the bytes, at least one, of a size such as "512MiB", "2G" or "1073741824". Raises InvalidRequest."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    matched = match is not None and match[2] in _UNITS
    size = float(match[1]) * _UNITS[match[2]] if match is not None and matched else 0.0  # hundreds of digits: infinite
    if not 1 <= size <= MAX_SIZE:
        raise InvalidRequest(f"{short_repr(text)} is no size; expected one such as 512MiB or 2GiB, at most 8192TiB")
    return int(size)
