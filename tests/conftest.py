"""What holds for every test."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

# Nothing here may fail for being slow: the cores are shared.
settings.register_profile("motley", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("motley")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """On tensors as small as the tests' a second thread costs 50 times more than it gives on busy cores."""
    torch.set_num_threads(1)
