"""Registry of scaling policies: a new one is a file and a line here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ....replicas.errors import InvalidRequest
from ...routing.prediction.latency_model import Slo
from .fixed_policy import FixedPolicy
from .queue_policy import QueuePolicy
from .scaling_policy import ScalingPolicy
from .slo_policy import SloPolicy

POLICIES: dict[str, Callable[..., ScalingPolicy]] = {"fixed": FixedPolicy, "queue": QueuePolicy, "slo": SloPolicy}
_POSITIVE = {"running", "queued_tokens", "catch_up_s"}  # settings that are divisors


def create_policy(name: str, slo: Slo, **settings: Any) -> ScalingPolicy:
    """Return a new policy. Raises InvalidRequest for an unknown policy or setting, or a wrong value."""
    if name not in POLICIES:
        raise InvalidRequest(f"policy: {name!r} is not known; expected one of {', '.join(POLICIES)}", param="policy")
    names = [
        each for each, kind in inspect.signature(POLICIES[name]).parameters.items() if kind.kind == kind.KEYWORD_ONLY
    ]
    for setting, value in settings.items():
        if setting not in names:
            expected = ", ".join(names)
            raise InvalidRequest(
                f"{setting}: policy {name!r} has no such setting; expected one of {expected}", param=setting
            )
        _check_setting(setting, value)
    return POLICIES[name](slo, **settings)


def _check_setting(setting: str, value: Any) -> None:
    if setting == "replicas":
        counts = value.values() if isinstance(value, dict) else [None]
        if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts):
            raise InvalidRequest(
                f"{setting}: {value!r} is not accepted; expected a whole number from 0 for each pool, by its name",
                param=setting,
            )
        return
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
    if not number or (value == 0 and setting in _POSITIVE):
        bound = "above 0" if setting in _POSITIVE else "from 0"
        raise InvalidRequest(f"{setting}: {value!r} is not accepted; expected a number {bound}", param=setting)
