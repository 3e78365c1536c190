"""Seeds for requests that give none."""

from __future__ import annotations

import secrets

DRAWN_SEED = -1  # asks for a fresh seed, like a request without one; vLLM and llama.cpp read it the same way


def fresh_seed() -> int:
    """Return a random 63-bit seed; it is shown to the client, who can repeat the request with it."""
    return secrets.randbits(63)
