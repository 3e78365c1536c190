"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011, "Parallel random numbers: as easy as 1, 2, 3").

A number depends on its key and counter alone, so a resumed stream repeats exactly without any saved state.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return four random 32-bit words from four counter words and two key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """Return the random number in [0, 1) for one output position: 53 bits, keyed by the 64-bit seed."""
    key = seed & _MASK, (seed >> 32) & _MASK
    high, low, _, _ = philox4x32((position & _MASK, (position >> 32) & _MASK, choice & _MASK, 0), key)
    return ((high >> 5) * 2**26 + (low >> 6)) / 2**53
