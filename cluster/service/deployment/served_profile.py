"""Profile of the served model, kept in the cluster: an ingress that starts while no replica is wanted must not
wait for one.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import ray

from ....replicas.types import ModelInfo, ReplicaProfile
from ...fleet.control.state.state_store import current_targets
from ...ray_compat.cluster_state import read_record, write_record
from ...routing.ingress_broadcast import APPLICATION

_KEY = f"served/{APPLICATION}".encode()


def store_served_profile(model: str, profile: ReplicaProfile) -> None:
    """Keep a replica's profile. `model`: folder or id that the service was started with. Does nothing without Ray."""
    if ray.is_initialized():
        write_record(_KEY, encode_profile(model, profile))


def load_profile_at_zero(model: str) -> ReplicaProfile | None:
    """Return the kept profile of a replica of this model; None if replicas are wanted, or none has been kept."""
    if not ray.is_initialized():
        return None
    targets = current_targets(APPLICATION)
    if not targets or any(targets.values()):
        return None
    record = read_record(_KEY)
    return None if record is None else decode_profile(model, record)


def encode_profile(model: str, profile: ReplicaProfile) -> bytes:
    return json.dumps({"served": model, "profile": asdict(profile)}).encode()


def decode_profile(model: str, record: bytes) -> ReplicaProfile | None:
    """Read a kept profile; None for another model, and for what another version of Motley has kept in another form."""
    whole: dict[str, Any] = json.loads(record)
    if whole["served"] != model:
        return None
    try:
        info = whole["profile"].pop("model")
        shown = ModelInfo(**{**info, "eos_token_ids": tuple(info["eos_token_ids"])})
        return ReplicaProfile(model=shown, **{**whole["profile"], "decode_s": tuple(whole["profile"]["decode_s"])})
    except (KeyError, TypeError):
        return None
