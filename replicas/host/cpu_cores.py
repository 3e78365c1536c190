"""The CPU of this machine, and how many of its cores this process may use."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def usable_cores() -> int:
    """Return the number of cores in this process's affinity mask where the system has one, else the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """Return the CPU's name as its maker gives it, or its architecture where the system does not know the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
