"""Integer arithmetic of sampling, in Triton: its results are the same on every card and on a CPU."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

from __future__ import annotations

import triton
import triton.language as tl

# Atomic addition of numbers that are not zero. Triton's own atomics say .relaxed, which ptxas accepts only from 7.0 on,
# and which is the default of red anyway.
ADD_PTX = tl.constexpr("""{
    .reg .pred wanted;
    setp.ne.s64 wanted, $2, 0;
    @wanted red.global.add.u64 [$1], $2;
    mov.b32 $0, 0;
}""")


@triton.jit
def weight_of(key):
    """Return int64, about 2**44 * exp(-key / 2**25), for int32 keys in [0, 2**30 + 2**21]; it never rises with the key.

    All arithmetic is in integers, so that every card and a CPU give the same result. 2**-f for the fraction f of the
    power of two is a polynomial fitted by Lawson's iteration, with a relative error of 2**-28.8; with its roundings the
    weight is within 1 and a relative error of 2**-27. All 2**30 keys were checked to confirm that it never rises.
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
    """Return the 53 bits of the random number, as the top bits of a uint64.

    The generator is Philox4x32-10, the same as in replicas/execution/philox.py.
    """
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
    """Return the ceiling, as int64, of fp32 numbers that are at most 2**62."""
    whole = value.to(tl.int64)
    return whole + (whole.to(tl.float32) < value).to(tl.int64)


@triton.jit
def part_of(total, bits):
    """Return floor(total * bits / 2**64) for int64 total and uint64 bits."""
    return tl.umulhi(total.to(tl.uint64), bits).to(tl.int64)


@triton.jit
def add(where, value, ASM: tl.constexpr):
    if ASM:
        tl.inline_asm_elementwise(ADD_PTX, "=r,l,l", [where.to(tl.int64), value], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.atomic_add(where, value, value != 0)
