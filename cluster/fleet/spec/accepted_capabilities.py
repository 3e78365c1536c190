"""Compute capabilities that a pool may ask for."""

from __future__ import annotations

import re

from ....kernels.device.compute_capability import CAPABILITIES
from ....replicas.errors import InvalidRequest

CAPABILITY_PATTERN = r"(>=)?(\d{1,2})\.(\d)"


def accepted_capabilities(text: str) -> list[str]:
    """Return the compute capabilities that a pool's entry admits: "7.5" that one, ">=8.0" all known ones from there on.

    Raises InvalidRequest if there are no kernels for any of them.
    """
    match = re.fullmatch(CAPABILITY_PATTERN, text)
    assert match is not None, "the pattern was checked"
    minimum = int(match[2]), int(match[3])
    found = [each for each in sorted(CAPABILITIES) if each == minimum or (match[1] and each > minimum)]
    if not found:
        available = ", ".join(f"{major}.{minor}" for major, minor in sorted(CAPABILITIES))
        raise InvalidRequest(f"{text!r} is not accepted; there are kernels for {available}")
    return [f"{major}.{minor}" for major, minor in found]
