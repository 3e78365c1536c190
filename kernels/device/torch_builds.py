"""Check whether a build of torch has machine code for a device, and which wheel has it, before anything is loaded."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from .compute_capability import TORCH_RELEASES, Release, capability_of

_INDEX = "https://download.pytorch.org/whl"


def has_machine_code(capability: tuple[int, int], archs: Sequence[str]) -> bool:
    """Return whether one of the architectures of a torch build runs on a compute capability.

    Machine code runs on the same major number from its own minor number on, and PTX on all later capabilities; PTX for
    a family (f) only on the same major number, and code for one capability (a) nowhere else.
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


def wheel_hint(capability: tuple[int, int]) -> str:
    """Return the pip command that installs a suitable torch.

    It names the full version of the installed torch, since pip would otherwise keep that. If that release has no build
    for the card, it names releases that have one. Raises UnsupportedCapability below 6.0.
    """
    builds = capability_of(*capability)[0].torch_builds
    if not builds:
        return "no build of torch has it any more"
    version = metadata.version("torch").partition("+")[0]
    major, minor = map(int, version.split(".")[:2])
    there = [build for build in builds if _has_build((major, minor), build)]
    if there:
        return f"pip install torch=={version}+{there[-1]} --index-url {_INDEX}/{there[-1]}"
    first, end = TORCH_RELEASES[builds[-1]]
    wanted = f">={_release_text(first)}" + (f",<{_release_text(end)}" if end else "")
    return f"pip install 'torch{wanted}' --index-url {_INDEX}/{builds[-1]}"


def _has_build(release: Release, build: str) -> bool:
    first, end = TORCH_RELEASES[build]
    return first <= release and (end is None or release < end)


def _release_text(release: Release) -> str:
    return "{}.{}".format(*release)


def is_cuda_build() -> bool:
    """Return whether the installed torch is a CUDA build, read from its files, since an import takes seconds."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return False
    said = Path(found.origin).with_name("version.py").read_text()
    return re.search(r"^cuda\b[^=\n]*=\s*['\"]", said, re.MULTILINE) is not None


def list_cards() -> tuple[tuple[str, tuple[int, int]], ...]:
    """Return name and compute capability of each kind of card that nvidia-smi reports.

    A CPU build of torch sees no cards. Empty where nvidia-smi does not run.
    """
    command = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    found = re.findall(r"^(.+), *(\d+)\.(\d+) *$", said, re.MULTILINE)
    return tuple(dict.fromkeys((name, (int(major), int(minor))) for name, major, minor in found))
