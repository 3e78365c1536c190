"""Initial estimates of how fast replicas are, from their own measurements and those of replicas like them. Pure."""

from __future__ import annotations

from dataclasses import replace

from ....replicas.types import PROFILED_BATCH_SIZES, ReplicaProfile
from .routing_query import ReplicaSpeed

_GUESS = ReplicaSpeed(
    1000.0, (0.05,) * len(PROFILED_BATCH_SIZES), 0.0, 512, 64, 1 << 17
)  # for a replica that has measured nothing


class ReplicaSpeeds:
    """Estimates of speed: a replica is as fast as the fastest so far of its pool on the same kind of device.

    A replica that measured itself while others started looks slow, and would get no requests that could correct this.
    An estimate that is too fast is soon corrected.
    """

    def __init__(self) -> None:
        self._fastest: dict[tuple[str, ...], ReplicaSpeed] = {}  # measured by any replica of a pool, by device

    def record(self, pool: str, profile: ReplicaProfile) -> bool:
        """Record the speed of a replica that joins; return whether it raises what others of its pool and device are
        held for.
        """
        own = profile_speed(profile)
        if own is _GUESS:
            return False
        fastest = self._fastest.get(alike := _alike(pool, profile), own)
        self._fastest[alike] = _faster(own, fastest)
        return _faster(fastest, own) != fastest

    def of(self, pool: str, profile: ReplicaProfile) -> ReplicaSpeed:
        own = profile_speed(profile)
        return own if own is _GUESS else _faster(own, self._fastest.get(_alike(pool, profile), own))


def profile_speed(profile: ReplicaProfile) -> ReplicaSpeed:
    """Return the speed that a profile states.

    A profile without rates, or with another release's, gets a guess that all such replicas share.
    """
    if len(profile.decode_s) != len(PROFILED_BATCH_SIZES) or profile.prefill_tokens_per_s <= 0:
        return _GUESS
    return ReplicaSpeed(
        profile.prefill_tokens_per_s,
        profile.decode_s,
        profile.context_s,
        profile.max_batch_tokens,
        max(1, profile.max_running),
        max(1, profile.kv_tokens),
    )


def _alike(pool: str, profile: ReplicaProfile) -> tuple[str, ...]:
    return pool, profile.device, profile.device_name, profile.fingerprint


def _faster(own: ReplicaSpeed, other: ReplicaSpeed) -> ReplicaSpeed:
    """Return a speed with the limits of `own`, and the better of both in everything else."""
    return replace(
        own,
        prefill_tokens_per_s=max(own.prefill_tokens_per_s, other.prefill_tokens_per_s),
        decode_s=tuple(map(min, own.decode_s, other.decode_s)),
        context_s=min(own.context_s, other.context_s),
    )
