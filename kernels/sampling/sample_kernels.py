"""Kernels of sample.py, which describes what they compute.

A row of logits is cut into chunks, with one program each, and the results of the chunks are combined at the start of
the next launch by every program that needs them. Nothing is sorted: the least likely token that is kept is found digit
by digit, ten bits of its key at a time, from histograms of how many tokens and how much weight each value of the digit
has. Sums of integers do not depend on their order, so the histograms may be filled by atomics, and neither the cut nor
the card changes a choice.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
# ruff: noqa: SIM102  a constexpr condition has an `if` of its own, so that code which it excludes is not compiled

from __future__ import annotations

import triton
import triton.language as tl

from .integer_arithmetic import add, ceiling, part_of, uniform_bits, weight_of

# Arguments with one number per row, which may be slices of larger tensors, and so may begin anywhere.
ROWS = (
    "temperatures", "top_ks", "top_ps", "min_ps", "seeds", "choices", "positions", "limits", "tokens", "logprobs"
)  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=("places", "repetitions", "presences", "frequencies"))
def penalise(
    logits, history, places, repetitions, presences, frequencies, out, V,
    COUNT: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Apply penalties to one chunk of logits per program, see `sample.penalize_logits`.

    COUNT is the mask of the bits of a history entry that hold the count.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    repetition = tl.load(repetitions + row)
    largest = tl.where(repetition == 1.0, float("inf"), 1.7014117331926443e38)  # half of the largest fp32 number
    presence = tl.load(presences + row)
    frequency = tl.load(frequencies + row).to(tl.float64)
    base = row.to(tl.int64) * V
    past = tl.load(places + row) * V
    for start in range(0, CHUNK, TILE):
        at = part * CHUNK + start + tl.arange(0, TILE)
        x = tl.load(logits + base + at, at < V, 0.0)
        entry = tl.load(history + past + at, at < V, 0).to(tl.int32)
        count = entry & COUNT
        scaled = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
        y = tl.where(entry != 0, tl.where(scaled > largest, largest, scaled), x)
        # Exact in fp64, then rounded: in fp32 it would be fused with the addition, which would then round only once.
        each = (count.to(tl.float64) * frequency).to(tl.float32)
        y = tl.where(count > 0, y - (presence + each), y)
        tl.store(out + base + at, y, at < V)


@triton.jit(do_not_specialize=("S",))
def survey(logits, tops, ids, sums, V, S, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """Store, for one chunk, its largest logit (NaN if any is), the lowest id that has it, and the sum of exp(logit -
    largest).
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    base = logits + row.to(tl.int64) * V
    best = tl.full((TILE,), float("-inf"), tl.float32)
    where = tl.zeros((TILE,), tl.int32)
    broken = tl.zeros((TILE,), tl.int32)
    for start in tl.range(0, CHUNK, TILE, loop_unroll_factor=4):
        at = part * CHUNK + start + tl.arange(0, TILE)
        x = tl.load(base + at, at < V, float("-inf"))
        where = tl.where(x > best, at, where)
        best = tl.where(x > best, x, best)
        broken |= (x != x).to(tl.int32)
    top = tl.max(best, axis=0)
    total = tl.zeros((TILE,), tl.float32)
    for start in tl.range(0, CHUNK, TILE, loop_unroll_factor=4):
        at = part * CHUNK + start + tl.arange(0, TILE)
        x = tl.load(base + at, at < V, float("-inf"))
        total += tl.where(x > float("-inf"), tl.exp(x - top), 0.0)
    place = row * S + part
    tl.store(tops + place, tl.where(tl.max(broken, axis=0) > 0, float("nan"), top))
    tl.store(ids + place, tl.min(tl.where(best == top, where, V), axis=0))
    tl.store(sums + place, tl.sum(total, axis=0))


@triton.jit
def _best(tops, row, S, SPLITS: tl.constexpr):
    """Return the largest logit of a row, and whether it is finite and no logit is NaN."""
    at = tl.arange(0, SPLITS)
    each = tl.load(tops + row * S + at, at < S, float("-inf"))
    top = tl.max(tl.where(each == each, each, float("-inf")), axis=0)
    broken = tl.max((each != each).to(tl.int32), axis=0)
    return top, (broken == 0) & (tl.abs(top) < float("inf"))


@triton.jit
def keys_and_weights(logits, row, at, top, temperature, min_p, V):
    """Return keys int32 and weights int64 of the tokens `at`; a token of weight 0 is never sampled.

    A key is (top - logit) / temperature, each step rounded as in fp32, in units of 2**-25, and at most 31.5.
    """
    x = tl.load(logits + row.to(tl.int64) * V + at, at < V, float("-inf"))
    depth = tl.div_rn(top - x, temperature)
    key = (tl.where(depth < 31.5, depth, 31.5) * 33554432.0).to(tl.int32)
    weight = weight_of(key)
    return key, tl.where(weight >= ceiling(min_p * 17592186044416.0), weight, 0)


@triton.jit
def _cut_counts(planes, wanted):
    """Return the digit at which `wanted` tokens are reached (1024 if never), and weight and number of the tokens before
    it.
    """
    at = tl.arange(0, 1024)
    weights = tl.load(planes + at)
    counts = tl.load(planes + 1024 + at)
    before = tl.cumsum(counts, axis=0) < wanted
    digit = tl.sum(before.to(tl.int32), axis=0)
    return digit, tl.sum(tl.where(before, weights, 0), axis=0), tl.sum(tl.where(before, counts, 0), axis=0)


@triton.jit
def _cut_weights(plane, wanted):
    """Return the digit at which a weight of `wanted` is reached, and the weight before it."""
    weights = tl.load(plane + tl.arange(0, 1024))
    before = tl.cumsum(weights, axis=0) < wanted
    return tl.sum(before.to(tl.int32), axis=0), tl.sum(tl.where(before, weights, 0), axis=0)


@triton.jit
def _after_top_k(planes, states, k):
    """Return the last key that top_k keeps, how many tokens with that key it keeps, and the weight of all kept tokens.

    With fewer than k tokens the key is above all keys and has no weight.
    """
    prefix = tl.load(states + 8).to(tl.int32)
    digit, weight, count = _cut_counts(planes + 4096, k - tl.load(states + 10))
    key = prefix * 1024 + digit
    ties = k - tl.load(states + 10) - count
    return key, ties, tl.load(states + 9) + weight + ties * weight_of(key)


@triton.jit(do_not_specialize=("S",), do_not_specialize_on_alignment=ROWS)
def tally(
    logits, temperatures, top_ks, top_ps, min_ps, tops, states, planes, V, S,
    STEP: tl.constexpr, ASM: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add one digit of the keys of a chunk to histograms.

        STEP   digit    among tokens                          planes of 1024    then known
        0      first    all                                   0, 1              digit of top_k; of top_p without it
        1, 2   2nd 3rd  whose key so far is top_k's           2, 3; 4, 5        top_k's last key
        3, 4   2nd 3rd  whose key so far is top_p's           6; 7              top_p's last key

    In a pair of planes the first holds weights, the second counts. `states` int64 [R, 5, 4] holds what a step has read
    from the planes of the step before, written by the program of the first chunk: the key so far, the weight before it,
    and the count before it or the weight that top_p wants.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    k = tl.load(top_ks + row).to(tl.int64)
    p = tl.load(top_ps + row)
    top, whole = _best(tops, row, S, SPLITS)
    wanted = (k > 0) | (p < 1.0)
    if STEP == 1 or STEP == 2:
        wanted = k > 0
    if STEP > 2:
        wanted = p < 1.0
    if wanted & whole & (temperature > 0.0):
        planes += row.to(tl.int64) * 8192
        states += row * 20
        prefix = tl.zeros((), tl.int32)
        weight = tl.zeros((), tl.int64)
        other = tl.zeros((), tl.int64)
        if STEP == 1:
            prefix, weight, other = _cut_counts(planes, k)
        if STEP == 2:
            other = tl.load(states + 6)
            digit, weight, count = _cut_counts(planes + 2048, k - other)
            prefix = tl.load(states + 4).to(tl.int32) * 1024 + digit
            weight += tl.load(states + 5)
            other += count
        if STEP == 3:
            if k > 0:
                total = _after_top_k(planes, states, k)[2]
            else:
                total = tl.sum(tl.load(planes + tl.arange(0, 1024)), axis=0)
            fraction = ceiling(p * 1099511627776.0).to(tl.uint64) << 24
            rest = total.to(tl.uint64) * fraction
            other = tl.maximum(part_of(total, fraction) + (rest != 0).to(tl.int64), 1)
            prefix, weight = _cut_weights(planes, other)
        if STEP == 4:
            other = tl.load(states + 14)
            weight = tl.load(states + 13)
            digit, more = _cut_weights(planes + 6144, other - weight)
            prefix = tl.load(states + 12).to(tl.int32) * 1024 + digit
            weight += more
        if STEP > 0:
            if part == 0:
                tl.store(states + STEP * 4, prefix.to(tl.int64))
                tl.store(states + STEP * 4 + 1, weight)
                tl.store(states + STEP * 4 + 2, other)
        min_p = tl.load(min_ps + row)
        temperature = tl.maximum(temperature, 1e-6)
        for start in range(0, CHUNK, TILE):
            at = part * CHUNK + start + tl.arange(0, TILE)
            key, weights = keys_and_weights(logits, row, at, top, temperature, min_p, V)
            if STEP == 0:
                add(planes + (key >> 20), weights, ASM)
                if k > 0:
                    add(planes + 1024 + (key >> 20), (weights > 0).to(tl.int64), ASM)
            elif STEP == 1 or STEP == 3:
                weights = tl.where((key >> 20) == prefix, weights, 0)
                digits = (key >> 10) & 1023
                add(planes + (2048 if STEP == 1 else 6144) + digits, weights, ASM)
                if STEP == 1:
                    add(planes + 3072 + digits, (weights > 0).to(tl.int64), ASM)
            else:
                weights = tl.where((key >> 10) == prefix, weights, 0)
                digits = key & 1023
                add(planes + (4096 if STEP == 2 else 7168) + digits, weights, ASM)
                if STEP == 2:
                    add(planes + 5120 + digits, (weights > 0).to(tl.int64), ASM)


@triton.jit
def _limit(planes, states, row, k, p, TOP_K: tl.constexpr, TOP_P: tl.constexpr):
    """Return the last key that is kept, and how many tokens with that key are kept, lowest ids first.

    Without a filter the key is above all keys.
    """
    key = tl.full((), 1073741824, tl.int32)
    ties = tl.zeros((), tl.int64)
    if TOP_K:
        if k > 0:
            key, ties, _total = _after_top_k(planes + row.to(tl.int64) * 8192, states + row * 20, k)
    if TOP_P:
        if p < 1.0:
            wanted = tl.load(states + row * 20 + 18)
            before = tl.load(states + row * 20 + 17)
            digit, weight = _cut_weights(planes + row.to(tl.int64) * 8192 + 7168, wanted - before)
            key = tl.load(states + row * 20 + 16).to(tl.int32) * 1024 + digit
            each = tl.maximum(weight_of(key), 1)
            ties = (wanted - before - weight + each - 1) // each
    return key, ties


@triton.jit(do_not_specialize=("S",), do_not_specialize_on_alignment=ROWS)
def weigh(
    logits, temperatures, top_ks, top_ps, min_ps, tops, states, planes, masses, equals, limits, V, S,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store, for one chunk, the weight of its tokens before the last key, and how many tokens have that key."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    top, whole = _best(tops, row, S, SPLITS)
    if whole & (temperature > 0.0):
        k = tl.load(top_ks + row).to(tl.int64)
        last, ties = _limit(planes, states, row, k, tl.load(top_ps + row), TOP_K, TOP_P)
        mass = tl.zeros((TILE,), tl.int64)
        equal = tl.zeros((TILE,), tl.int32)
        min_p = tl.load(min_ps + row)
        temperature = tl.maximum(temperature, 1e-6)
        for start in range(0, CHUNK, TILE):
            at = part * CHUNK + start + tl.arange(0, TILE)
            key, weights = keys_and_weights(logits, row, at, top, temperature, min_p, V)
            mass += tl.where(key < last, weights, 0)
            equal += ((key == last) & (weights > 0)).to(tl.int32)
        tl.store(masses + row * S + part, tl.sum(mass, axis=0))
        tl.store(equals + row * S + part, tl.sum(equal, axis=0))
        if part == 0:
            tl.store(limits + row * 2, last.to(tl.int64))
            tl.store(limits + row * 2 + 1, ties)


@triton.jit(do_not_specialize=("S",), do_not_specialize_on_alignment=ROWS)
def draw(
    logits, own, temperatures, min_ps, seeds, choices, positions, tops, ids, own_tops, own_sums, masses, equals,
    limits, tokens, logprobs, V, S,
    SPLITS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sample the token of one row per program.

    It finds the chunk in which the random number falls, then the token in it, and its log-probability in `own`.
    """
    row = tl.program_id(0)
    at = tl.arange(0, SPLITS)
    temperature = tl.load(temperatures + row)
    top, whole = _best(tops, row, S, SPLITS)
    own_top, own_whole = _best(own_tops, row, S, SPLITS)
    whole = whole & own_whole
    largest = tl.load(tops + row * S + at, at < S, float("-inf")) == top
    token = tl.min(tl.where(largest, tl.load(ids + row * S + at, at < S, 0), V), axis=0)
    if whole & (temperature > 0.0):
        last = tl.load(limits + row * 2)
        left = tl.load(limits + row * 2 + 1)
        each = weight_of(last.to(tl.int32))
        equal = tl.load(equals + row * S + at, at < S, 0).to(tl.int64)
        kept = tl.minimum(tl.maximum(left - (tl.cumsum(equal, axis=0) - equal), 0), equal)
        mass = tl.load(masses + row * S + at, at < S, 0) + kept * each
        bits = uniform_bits(tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row))
        target = part_of(tl.sum(mass, axis=0), bits)
        passed = tl.cumsum(mass, axis=0) <= target
        part = tl.sum(passed.to(tl.int32), axis=0)
        target -= tl.sum(tl.where(passed, mass, 0), axis=0)
        left -= tl.sum(tl.where(passed, equal, 0), axis=0)
        min_p = tl.load(min_ps + row)
        temperature = tl.maximum(temperature, 1e-6)
        # Find the tile in which the target lies, skipping the tiles before it.
        first = part * CHUNK
        found = tl.zeros((), tl.int32)
        for start in range(0, CHUNK, TILE):
            which = part * CHUNK + start + tl.arange(0, TILE)
            key, weights = keys_and_weights(logits, row, which, top, temperature, min_p, V)
            count = tl.sum(((key == last) & (weights > 0)).to(tl.int32), axis=0).to(tl.int64)
            here = tl.sum(tl.where(key < last, weights, 0), axis=0) + tl.minimum(tl.maximum(left, 0), count) * each
            found |= (here > target).to(tl.int32)
            target -= tl.where(found == 0, here, 0)
            left -= tl.where(found == 0, count, 0)
            first += tl.where(found == 0, TILE, 0)
        which = first + tl.arange(0, TILE)
        key, weights = keys_and_weights(logits, row, which, top, temperature, min_p, V)
        tied = (key == last) & (weights > 0)
        among = tied & (tl.cumsum(tied.to(tl.int32), axis=0) <= left)
        weights = tl.where((key < last) | among, weights, 0)
        token = tl.min(tl.where(tl.cumsum(weights, axis=0) > target, which, V), axis=0)
    # Whatever was computed, the id must be a valid one.
    token = tl.where(whole & (token >= 0) & (token < V), token, 0)
    sums = tl.load(own_sums + row * S + at, at < S, 0.0)
    chunk_tops = tl.load(own_tops + row * S + at, at < S, float("-inf"))
    total = tl.sum(tl.where(chunk_tops > float("-inf"), sums * tl.exp(chunk_tops - own_top), 0.0), axis=0)
    logprob = tl.load(own + row.to(tl.int64) * V + token) - own_top - tl.log(total)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.where(whole, logprob, float("nan")))
