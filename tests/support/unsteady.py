"""Tests that are known to fail now and then through no fault of what they test: named here, with the reason.

They run each time and are shown, but only `make thorough` fails for them. No other test is ever tried again. A name
stays until its test is mended, and there are five at most.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

UNSTEADY: Mapping[str, str] = {}  # id of a test without that of its case: what it meets, where, how often
MAX_NAMED = 5


def allow(items: list[pytest.Item], named: Mapping[str, str] = UNSTEADY) -> None:
    """Mark the tests that may fail. Their outcomes are XFAIL and XPASS in the summary, each with the reason."""
    for item in items:
        if reason := named.get(item.nodeid.partition("[")[0]):
            item.add_marker(pytest.mark.xfail(reason=f"known to be unsteady: {reason}", strict=False))
