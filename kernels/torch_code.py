"""Whether a build of torch has code for a device, and which wheel has: told before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import metadata

from .capability import capability_of

__all__ = ["has_code", "wheel_for"]

_INDEX = "https://download.pytorch.org/whl"


def has_code(capability: tuple[int, int], archs: Sequence[str]) -> bool:
    """Machine code runs on its own major capability from its minor on, PTX on all that come after; that of a family
    (f) on its major too, and of one alone (a) nowhere else.
    """
    major, minor = capability
    for arch in archs:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if found is None:
            continue
        kind, built_major, built_minor, special = found[1], int(found[2]), int(found[3]), found[4]
        if special == "a":
            fits = (built_major, built_minor) == capability
        elif kind == "compute" and not special:
            fits = (built_major, built_minor) <= capability
        else:
            fits = built_major == major and built_minor <= minor
        if fits:
            return True
    return False


def wheel_for(capability: tuple[int, int]) -> str:
    """How to install one; by the full version of the torch that is installed: by name alone pip would keep that.

    Raises UnsupportedCapability below 6.0.
    """
    builds = capability_of(*capability)[0].torch_builds
    if not builds:
        return "no build of torch has it any more"
    release = metadata.version("torch").partition("+")[0]
    return f"pip install torch=={release}+{builds[-1]} --index-url {_INDEX}/{builds[-1]}"
