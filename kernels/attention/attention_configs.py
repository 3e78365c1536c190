"""Launch configs of the paged attention kernels that a tuner may try; the first of each list is the default without a
tuned table.
"""

from __future__ import annotations

from itertools import product

from triton import next_power_of_2

from ..device.precision import PrecisionPolicy
from ..launch.kernel_operation import ProblemShape
from ..launch.variant import Config
from .attention_decode import MAX_SPLITS


def visible_tokens(shape: ProblemShape, new: int) -> int:
    """Number of tokens of context that at least one of `new` new tokens at its end sees."""
    return int(min(shape["context"], shape["window"] + new - 1) if shape["window"] else shape["context"])


def _splits(shape: ProblemShape) -> list[int]:
    """Numbers of splits of a sequence's KV to try in decode, all powers of two; the default one first.

    Every split keeps at least 128 tokens, and programs times splits stay within 8192, which bounds the memory of
    partial results.
    """
    tokens = visible_tokens(shape, 1)
    programs = shape["batch"] * shape["kv_heads"]
    possible = [1 << i for i in range(MAX_SPLITS.bit_length()) if 1 << i <= max(1, tokens // 128)]
    possible = [splits for splits in possible if splits == 1 or programs * splits <= 8192]
    first = max(splits for splits in possible if splits == 1 or (tokens >= 256 * splits and programs * splits <= 1024))
    return [first, *(splits for splits in possible if splits != first)]


def packed_configs(shape: ProblemShape) -> tuple[Config, ...]:
    """Return the configs to try for the "packed GQA" decode kernel.

    The block ids of a step are loaded one pipeline stage before its keys: with fewer than 3 stages the kernel waits for
    them, and 4 stages gain nothing.
    """
    wide = shape["dim"] > 128
    cuts = [(32, 4, 3), (64, 8, 3)] if wide else [(64, 4, 3), (32, 4, 5), (32, 2, 3), (128, 8, 3)]
    if shape["kv"] == "int8":  # int8 KV is converted in registers
        cuts = [(32, 4, 3), (32, 8, 3)] if wide else [(32, 4, 3), (64, 4, 3), (32, 4, 5), (128, 8, 3)]
        if not wide and _masked(shape):  # the other configs spill registers
            cuts = [(64, 4, 3), (32, 4, 5)]
    return tuple(
        Config.of(warps, stages, BLOCK=block, SPLITS=count, WIDE=False)
        for count, (block, warps, stages) in product(_splits(shape), cuts)
    )


def _masked(shape: ProblemShape) -> bool:
    """Return whether tiles are masked: by a sliding window, or because a tile is wider than the head dim."""
    return bool(shape["window"]) or shape["dim"] != next_power_of_2(shape["dim"])


def _uneven(shape: ProblemShape) -> bool:
    """Return whether a number of heads is no power of two, so that rows and KV cells take more than shifts to
    compute.
    """
    return any(number != next_power_of_2(number) for number in (shape["heads"], shape["kv_heads"]))


def per_head_configs(shape: ProblemShape) -> tuple[Config, ...]:
    """Return the configs to try for the "per head" decode kernel: eight elements of a tile for each thread.

    Configs with up to 4 heads per program come first, as do those with all heads that share a KV head, although with 7
    or 8 heads of dim 128 the registers leave only 8 warps per SM.
    """
    group = shape["heads"] // shape["kv_heads"]
    rows = 4 * 32 * 8 // next_power_of_2(shape["dim"])
    together = sorted((h for h in range(1, 9) if group % h == 0), key=lambda h: (h > 4 and h != group, -min(h, 4), h))
    return tuple(
        Config.of(4, 1, HEADS=heads, ROWS=rows, UNROLL=unroll, SPLITS=count)
        for count, heads in product(_splits(shape), together)
        for unroll in ((2, 4) if heads <= 4 else (2, 1))
    )


# Keys: the instruction that tl.dot is compiled to (below capability 8.0 always fma.rn.f32), the largest head dim, and
# whether KV is int8. Values: (ROWS, BLOCK, warps) that compile without register spills (Triton 3.6 to 3.9); static
# results, not measured ones.
_PREFILL: dict[tuple[str, int, bool], tuple[tuple[int, int, int], ...]] = {
    ("6.x", 64, False): ((64, 32, 8), (64, 16, 4), (32, 16, 4)),
    ("6.x", 128, False): ((64, 16, 8), (32, 16, 4), (32, 32, 8), (64, 16, 4)),
    ("6.x", 256, False): ((16, 16, 4),),
    ("7.x", 64, False): ((64, 32, 8), (32, 16, 4)),
    ("7.x", 128, False): ((32, 32, 8), (32, 16, 8)),
    ("7.x", 256, False): ((32, 16, 8), (16, 16, 8)),
    ("mma.sync", 64, False): ((128, 64, 8), (64, 64, 4), (128, 32, 8), (64, 32, 4)),
    ("mma.sync", 128, False): ((128, 32, 8), (64, 32, 4), (64, 64, 8), (128, 64, 8)),
    ("mma.sync", 256, False): ((64, 32, 8), (32, 32, 4)),
    ("mma.sync", 64, True): ((128, 32, 8), (64, 32, 4)),
    ("mma.sync", 128, True): ((64, 64, 8), (64, 32, 8)),
    ("mma.sync", 256, True): ((64, 16, 8), (32, 32, 8)),
    ("wgmma", 64, False): ((128, 64, 8), (128, 128, 8), (64, 64, 4), (64, 128, 4)),
    ("wgmma", 128, False): ((128, 64, 8), (64, 64, 4), (128, 128, 8), (128, 32, 8)),
    ("wgmma", 256, False): ((128, 32, 8), (64, 32, 8)),
    ("wgmma", 64, True): ((128, 64, 8), (64, 64, 4), (64, 128, 4)),
    ("wgmma", 128, True): ((128, 64, 8), (64, 64, 4), (128, 32, 8)),
    ("wgmma", 256, True): ((128, 32, 8), (64, 32, 8)),
    ("tcgen05", 64, False): ((128, 128, 8), (128, 32, 8), (64, 128, 4), (64, 32, 4)),
    ("tcgen05", 128, False): ((128, 64, 8), (64, 64, 4), (128, 128, 8), (128, 32, 8)),
    ("tcgen05", 256, False): ((128, 32, 8),),
    ("tcgen05", 64, True): ((128, 64, 8), (64, 64, 4), (128, 32, 8)),
    ("tcgen05", 128, True): ((128, 64, 8), (64, 64, 4), (128, 32, 8)),
    ("tcgen05", 256, True): ((64, 32, 8), (64, 32, 4)),
}  # fmt: skip
_SPILL_MASKED_OR_UNEVEN = {("mma.sync", 128, False, (128, 64, 8))}
_SPILL_ON_8_6 = {
    ("mma.sync", 64, True, (64, 32, 4)),
    ("mma.sync", 128, False, (128, 64, 8)),
    ("mma.sync", 128, False, (64, 64, 8)),
}
_SPILL_ON = {(8, 0): {("mma.sync", 128, False, (64, 32, 4))}, (8, 6): _SPILL_ON_8_6, (8, 9): _SPILL_ON_8_6}


def prefill_configs(policy: PrecisionPolicy, shape: ProblemShape) -> tuple[Config, ...]:
    """Return the configs to try for the prefill kernel, without those that are known to spill registers."""
    lanes = not policy.pipelined
    unit = f"{policy.capability.major}.x" if lanes else policy.attention_unit.instruction
    width = max(64, next_power_of_2(shape["dim"]))
    kind = (unit, width, shape["kv"] == "int8" and not lanes)
    spill = _SPILL_ON.get(policy.capability.version, set())
    if _masked(shape) or _uneven(shape):
        spill = spill | _SPILL_MASKED_OR_UNEVEN
    return tuple(
        Config.of(warps, 3 if policy.pipelined else 1, ROWS=rows, BLOCK=block, WIDE=lanes)
        for rows, block, warps in _PREFILL[kind]
        if (*kind, (rows, block, warps)) not in spill
    )
