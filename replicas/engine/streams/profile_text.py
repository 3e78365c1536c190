"""Text form of a replica's profile, as it is sent to routers."""

from __future__ import annotations

import json
from dataclasses import asdict

from ...types import ModelInfo, ReplicaProfile


def profile_to_text(profile: ReplicaProfile) -> str:
    return json.dumps(asdict(profile))


def profile_from_text(text: str) -> ReplicaProfile:
    """Return the profile that `profile_to_text` made this text from."""
    fields = json.loads(text)
    model = fields.pop("model")
    model["eos_token_ids"] = tuple(model["eos_token_ids"])
    fields["decode_s"] = tuple(fields["decode_s"])
    return ReplicaProfile(model=ModelInfo(**model), **fields)
