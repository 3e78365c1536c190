"""Objectives of a fleet file, and the policy that decides by them how many replicas there are."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from .value_types import NotNegative, Objective, Positive, Seconds, Spec, spec_error


class ScalingSpec(Spec):
    """Policy that decides how many replicas there are, within each pool's `replicas`.

    Settings have the policy's defaults.
    """

    policy: Literal["fixed", "queue", "slo"] = "fixed"
    """fixed: only operators change the number of replicas; queue: by the load that waits and runs; slo: by what the
    objectives need."""
    running: Positive | None = None
    """For policy queue: wanted number of sequences on each replica, running or waiting."""
    queued_tokens: Positive | None = None
    """For policy queue: wanted number of waiting prompt tokens on each replica."""
    tolerance: NotNegative | None = None
    """For policy queue: a load that deviates by no more than this share changes nothing; 0.2 is 20%."""
    headroom: NotNegative | None = None
    """For policy slo: share of capacity to provide beyond the expected load; 0.2 is 20%."""
    settle_s: Seconds | None = None
    """For policies queue and slo: seconds for which fewer replicas must have been enough before one is removed."""
    cooldown_s: Seconds | None = None
    """For policy slo: seconds between two reductions of the number of replicas."""
    catch_up_s: Positive | None = None
    """For policy slo: seconds within which prompts that wait too long are to be worked off."""
    idle_s: Seconds | None = None
    """For policies queue and slo: seconds without any request after which pools shrink to their minimum, even to 0."""

    SETTINGS: ClassVar[dict[str, frozenset[str]]] = {
        "fixed": frozenset(),
        "queue": frozenset({"running", "queued_tokens", "tolerance", "settle_s", "idle_s"}),
        "slo": frozenset({"headroom", "settle_s", "cooldown_s", "catch_up_s", "idle_s"}),
    }

    @classmethod
    def bounds(cls, setting: str) -> tuple[float, float] | None:
        """Return the least and the most that a setting may be; None if no policy has it."""
        if not any(setting in names for names in cls.SETTINGS.values()):
            return None
        [number] = [each for each in cls.model_json_schema()["properties"][setting]["anyOf"] if "minimum" in each]
        return number["minimum"], number["maximum"]

    @property
    def settings(self) -> dict[str, float]:
        """Settings that the fleet file gives, by name."""
        return {name: value for name, value in self if name != "policy" and value is not None}

    @model_validator(mode="after")
    def _check(self) -> ScalingSpec:
        for name in self.settings:
            if name not in self.SETTINGS[self.policy]:
                having = " or ".join(policy for policy, names in self.SETTINGS.items() if name in names)
                raise spec_error(f"the policy {self.policy!r} has no such setting; {having} has", name)
        return self


class SloSpec(Spec):
    """Latency objectives that each request should meet."""

    ttft_ms: Objective
    """Time to first token, in milliseconds."""
    tpot_ms: Objective
    """Time per token after the first one, in milliseconds."""
    shed: bool = False
    """Refuse requests that are predicted to miss the objectives, rather than serve them late."""
