"""Seeds for requests that bring none."""

from __future__ import annotations

import secrets


def fresh_seed() -> int:
    """A random 63-bit seed; shown to the client, who can repeat the request with it."""
    return secrets.randbits(63)
