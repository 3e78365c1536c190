"""Tries what failed beside other work once more, alone: `python alone.py CACHE_DIR ...`, one for each part of it all.

The parts run two at a time on two cores, and many tests look at what happens by a clock: now and then one of thousands
meets a machine that stood still. Whatever fails again alone is a failure, and so are a crash, an error of collection
and more failures than chance explains. What passes is named, for a test like that wants mending.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MOST = 3
NOTED = "motley/failed"  # in pytest's cache; what it notes itself lacks subtests
PASSED, FAILED = "0", "1"  # pytest's exit statuses of a part that came to its end


def note_failures(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Leaves in pytest's cache what has failed: an entry for each report that it counts, a test's or a subtest's."""
    if (cache := getattr(config, "cache", None)) is not None:
        reports = [report for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, ())]
        cache.set(NOTED, [report.nodeid for report in reports])


def failed(cache_dir: Path) -> list[str]:
    """The ids of the tests that failed in one part. Raises RuntimeError if it did not come to its end."""
    status = (cache_dir / "status").read_text().strip()
    if status == PASSED:
        return []
    if status != FAILED:
        raise RuntimeError(f"{cache_dir.name}: pytest ended with {status}")
    if not (noted := json.loads((cache_dir / "v" / NOTED).read_text())):
        raise RuntimeError(f"{cache_dir.name}: pytest does not say what failed")
    return list(dict.fromkeys(noted))


def main(cache_dirs: list[str]) -> int:
    try:
        tests = [test for cache_dir in cache_dirs for test in failed(Path(cache_dir))]
    except (RuntimeError, OSError, ValueError) as error:
        print(f"not tried again: {error}")
        return 1
    if not 0 < len(tests) <= MOST:
        print(f"not tried again: {len(tests)} tests failed")
        return 1
    print("once more, alone:", *tests, sep="\n  ", flush=True)
    again = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    if status := subprocess.run(again, check=False).returncode:
        return status
    print("failed beside other work, passed alone:", *tests, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
