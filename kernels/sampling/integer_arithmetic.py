"""The whole numbers in which sample.py chooses, as Triton has them: the same on every card, and on a CPU."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

from __future__ import annotations

import triton
import triton.language as tl

# Adds what is not zero. Triton's own atomics say .relaxed, which ptxas takes from 7.0 on; it is what red means anyway.
ADD_PTX = tl.constexpr("""{
    .reg .pred wanted;
    setp.ne.s64 wanted, $2, 0;
    @wanted red.global.add.u64 [$1], $2;
    mov.b32 $0, 0;
}""")


@triton.jit
def weight_of(key):
    """int64, about 2**44 * exp(-key / 2**25), for key int32 in [0, 2**30 + 2**21]; falls or stays as the key rises.

    In whole numbers throughout, so that every card and a CPU give the same. 2**-f for the fraction f of the power of
    two is a polynomial fitted by Lawson's iteration, to 2**-28.8 of it; with its roundings the weight is within 1 and
    2**-27 of it. That it never rises was seen of all 2**30 keys.
    """
    power = key.to(tl.uint32).to(tl.uint64) * 3098164009  # log2(e) * 2**31
    fraction = ((power >> 24) & 0xFFFFFFFF).to(tl.uint32)
    value = fraction * 0 + 234126
    value = 2737501 - tl.umulhi(fraction, value)
    value = 20571132 - tl.umulhi(fraction, value)
    value = 119165493 - tl.umulhi(fraction, value)
    value = 515877902 - tl.umulhi(fraction, value)
    value = 1488521986 - tl.umulhi(fraction, value)
    value = 2147483648 - tl.umulhi(fraction, value)
    return ((value.to(tl.uint64) << 13) >> (power >> 56)).to(tl.int64)


@triton.jit
def uniform_bits(seed, choice, position):
    """The 53 bits of the random number, the top ones of an uint64: Philox4x32-10, as replicas/philox.py has it."""
    c0 = position.to(tl.uint64) & 0xFFFFFFFF
    c1 = position.to(tl.uint64) >> 32
    c2 = choice.to(tl.uint64) & 0xFFFFFFFF
    c3 = c2 * 0
    k0 = seed.to(tl.uint64) & 0xFFFFFFFF
    k1 = seed.to(tl.uint64) >> 32
    for _ in tl.static_range(10):
        product0 = c0 * 0xD2511F53
        product1 = c2 * 0xCD9E8D57
        c0 = (product1 >> 32) ^ c1 ^ k0
        c1 = product1 & 0xFFFFFFFF
        c2 = (product0 >> 32) ^ c3 ^ k1
        c3 = product0 & 0xFFFFFFFF
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return (((c0 >> 5) << 26) + (c1 >> 6)) << 11


@triton.jit
def ceiling(value):
    """int64 of fp32 that is at most 2**62."""
    whole = value.to(tl.int64)
    return whole + (whole.to(tl.float32) < value).to(tl.int64)


@triton.jit
def part_of(total, bits):
    """floor(total * bits / 2**64) of int64 and uint64."""
    return tl.umulhi(total.to(tl.uint64), bits).to(tl.int64)


@triton.jit
def add(where, value, ASM: tl.constexpr):
    if ASM:
        tl.inline_asm_elementwise(ADD_PTX, "=r,l,l", [where.to(tl.int64), value], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.atomic_add(where, value, value != 0)
