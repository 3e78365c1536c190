"""Host memory: how much of it is free, and which processes share it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_memory(cgroup: Path = _CGROUP) -> int:
    """Return the free bytes of this machine, or fewer if its control group (v2) may take less: a container sees the
    whole machine's memory.
    """
    return _of_group(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), cgroup)


def available_memory(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the free bytes plus those that the page cache gives back when they are wanted."""
    with suppress(OSError):
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return _of_group(int(line.split()[1]) * 1024, cgroup)
    return free_memory(cgroup)


def total_memory(cgroup: Path = _CGROUP) -> int:
    """Return the bytes of this machine's memory, or as many of them as its control group (v2) may have."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = (cgroup / "memory.max").read_text().strip()
    except OSError:  # no such group, or of version 1
        return whole
    return whole if limit == "max" else min(whole, int(limit))


def memory_owner(cgroup: Path = _CGROUP, boot: Path = Path("/proc/sys/kernel/random/boot_id")) -> str:
    """Return a name for the memory that `free_memory` counts: the same in processes that share one machine, or one
    control group if that has a limit.

    A machine without a boot id gets an empty name, so that all such processes count as sharing one machine.
    """
    machine, group = "", ""
    with suppress(OSError):
        machine = boot.read_text().strip()
    with suppress(OSError):
        if (cgroup / "memory.max").read_text().strip() != "max":
            group = f"/{cgroup.stat().st_ino}"
    return machine + group


def _of_group(free: int, cgroup: Path) -> int:
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        cached = int(stat.get("inactive_file", 0))  # the page cache gives these bytes back when they are wanted
        return free if limit == "max" else max(0, min(free, int(limit) - used + cached))
    except (OSError, ValueError):  # no such group, or of version 1
        return free
