"""Sizes as people write them."""

from __future__ import annotations

import re

from .errors import InvalidRequest

__all__ = ["parse_size"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str) -> int:
    """Bytes, at least one: "512MiB", "2G", "1073741824". Raises InvalidRequest."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS or not (size := int(float(match[1]) * _UNITS[match[2]])):
        raise InvalidRequest(f"{text!r} is no size; expected one such as 512MiB, 2GiB or 1073741824")
    return size
