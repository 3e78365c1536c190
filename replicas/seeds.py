"""Seeds for requests that bring none."""

from __future__ import annotations

import secrets

DRAWN_SEED = -1  # asks for a fresh one, as no seed does: so vLLM and llama.cpp have it


def fresh_seed() -> int:
    """A random 63-bit seed; shown to the client, who can repeat the request with it."""
    return secrets.randbits(63)
