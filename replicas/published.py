"""A replica's profile as text, as it travels to those who choose among replicas."""

from __future__ import annotations

import json
from dataclasses import asdict

from .protocol import ModelInfo, ReplicaProfile

__all__ = ["profile_of", "text_of"]


def text_of(profile: ReplicaProfile) -> str:
    return json.dumps(asdict(profile))


def profile_of(text: str) -> ReplicaProfile:
    """The profile that `text_of` was given."""
    fields = json.loads(text)
    model = fields.pop("model")
    model["eos_token_ids"] = tuple(model["eos_token_ids"])
    fields["decode_s"] = tuple(fields["decode_s"])
    return ReplicaProfile(model=ModelInfo(**model), **fields)
