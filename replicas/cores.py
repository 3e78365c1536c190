"""The CPU of this machine, and how many of its cores this process may use."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def usable_cores() -> int:
    """Cores of this process's affinity mask where the system has one, else of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """As its maker calls it, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
