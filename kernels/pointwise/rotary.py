"""Rotary position embedding and the write to the paged KV cache, in one pass over q, k and v.

Each program takes one token and some of its query heads, or some of its key heads with their values. A head is held as
its two halves, [heads, D / 2] each, with lanes masked off where D / 2 is no power of two (80, 96).

For an int8 cache a vector's scale is its absmax / 127 in fp32, and its codes are rounded to the nearest integer, ties
to even. A vector of zeros has scale 0 and codes 0.

Overflow of fp16: rotation can increase a finite value to 1.42 times 65504; it is then stored as 65504 with its sign.
Values that were infinite or NaN before stay so (with int8, the scale is NaN) and reach the logits, where
sampling/sample.py detects them.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..attention.kv_cache import BLOCK_TOKENS, KvCache
from ..device.dtypes import type_name
from ..launch.compiled_launch import cached, cdiv
from ..launch.variant import Config, Variant


@triton.jit
def _fitting(value, pointer):
    """Convert fp32 `value` to the dtype of `pointer`; finite values stay finite in fp16."""
    if pointer.dtype.element_ty == tl.float16:
        fits = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
        value = tl.where(tl.abs(value) < float("inf"), fits, value)
    return value.to(pointer.dtype.element_ty)


@triton.jit
def _halves(x, row, D: tl.constexpr, HALF: tl.constexpr, valid):
    """Load both halves of the heads at `row` [heads, 1] of x, as fp32 [heads, HALF] each."""
    column = tl.arange(0, HALF)[None, :]
    inside = valid & (column < D // 2)
    first = tl.load(x + row + column, inside, 0.0).to(tl.float32)
    second = tl.load(x + row + D // 2 + column, inside, 0.0).to(tl.float32)
    return first, second


@triton.jit
def _store(out, row, first, second, D: tl.constexpr, HALF: tl.constexpr, valid):
    column = tl.arange(0, HALF)[None, :]
    inside = valid & (column < D // 2)
    tl.store(out + row + column, _fitting(first, out), inside)
    tl.store(out + row + D // 2 + column, _fitting(second, out), inside)


@triton.jit
def _turned(first, second, cos, sin, token, head, D: tl.constexpr, HALF: tl.constexpr):
    column = tl.arange(0, HALF)[None, :] + head * 0  # for every head: a thread loads the angles of its own elements
    at = token.to(tl.int64) * (D // 2) + column
    c = tl.load(cos + at, column < D // 2, 0.0)
    s = tl.load(sin + at, column < D // 2, 0.0)
    return first * c - second * s, second * c + first * s


@triton.jit
def _code(value, scale, finite):
    """Return the int8 code nearest to value / scale: adding 1.5 * 2**23 leaves no bits for a fraction."""
    code = tl.div_rn(value, tl.where(scale > 0.0, scale, 1.0)) + 12582912.0 - 12582912.0
    code = tl.minimum(tl.maximum(code, -127.0), 127.0)
    return tl.where(finite & (scale > 0.0), code, 0.0).to(tl.int8)


@triton.jit
def _store_codes(out, scales, row, vector, first, second, D: tl.constexpr, HALF: tl.constexpr, valid):
    column = tl.arange(0, HALF)[None, :]
    inside = valid & (column < D // 2)
    sizes = tl.maximum(tl.abs(first), tl.abs(second))
    broken = (tl.abs(first) < float("inf")) & (tl.abs(second) < float("inf"))
    finite = tl.min(broken.to(tl.int32), axis=1)[:, None] > 0
    scale = tl.div_rn(tl.max(tl.where(finite, sizes, 0.0), axis=1), 127.0)[:, None]
    tl.store(out + row + column, _code(first, scale, finite), inside)
    tl.store(out + row + D // 2 + column, _code(second, scale, finite), inside)
    tl.store(scales + vector, tl.where(finite, scale, float("nan")), valid)


@triton.jit(do_not_specialize=("heads",))
def _rotate(
    x, cos, sin, out, heads, token_stride,
    D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of one token per program, into a contiguous tensor."""
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    valid = head < heads
    first, second = _halves(x, token.to(tl.int64) * token_stride + head * D, D, HALF, valid)
    first, second = _turned(first, second, cos, sin, token, head, D, HALF)
    _store(out, (token.to(tl.int64) * heads + head) * D, first, second, D, HALF, valid)


@triton.jit(do_not_specialize=("heads", "kv_heads", "num_blocks"))
def _write(
    q, k, v, cos, sin, q_out, slots, data, scales, heads, kv_heads, num_blocks, q_stride, k_stride, v_stride,
    D: tl.constexpr, HALF: tl.constexpr, ROTATE: tl.constexpr, INT8: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate q and k of one token and write k and v to the cache.

    The first programs of a token rotate its query heads, the others write its KV heads; without ROTATE the first do not
    exist.
    """
    token = tl.program_id(0)
    part = tl.program_id(1)
    query_parts = 0
    if ROTATE:
        query_parts = tl.cdiv(heads, HEADS)
    if part < query_parts:
        head = part * HEADS + tl.arange(0, HEADS)[:, None]
        valid = head < heads
        first, second = _halves(q, token.to(tl.int64) * q_stride + head * D, D, HALF, valid)
        first, second = _turned(first, second, cos, sin, token, head, D, HALF)
        _store(q_out, (token.to(tl.int64) * heads + head) * D, first, second, D, HALF, valid)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            head = (part - query_parts) * HEADS + tl.arange(0, HEADS)[:, None]
            valid = head < kv_heads
            vector = ((slot // BLOCK_TOKENS) * kv_heads + head) * BLOCK_TOKENS + slot % BLOCK_TOKENS
            value_vector = vector + num_blocks.to(tl.int64) * kv_heads * BLOCK_TOKENS
            first, second = _halves(k, token.to(tl.int64) * k_stride + head * D, D, HALF, valid)
            if ROTATE:
                first, second = _turned(first, second, cos, sin, token, head, D, HALF)
            v_first, v_second = _halves(v, token.to(tl.int64) * v_stride + head * D, D, HALF, valid)
            if INT8:
                _store_codes(data, scales, vector * D, vector, first, second, D, HALF, valid)
                _store_codes(data, scales, value_vector * D, value_vector, v_first, v_second, D, HALF, valid)
            else:
                _store(data, vector * D, first, second, D, HALF, valid)
                _store(data, value_vector * D, v_first, v_second, D, HALF, valid)


@cached
def rotary_variant(dtype: str, head_dim: int, config: Config) -> Variant:
    """Return the compiled variant of the rotary kernel.

    dtype   Triton type name of x and the result
    config  HEADS of a token per program, a power of two
    """
    types = {
        "x": f"*{dtype}", "cos": "*fp32", "sin": "*fp32", "out": f"*{dtype}", "heads": "i32", "token_stride": "i32",
    }  # fmt: skip
    aligned = _aligned(types, head_dim, "token_stride")
    return Variant("rotary", _rotate, tuple(types.items()), _halved(head_dim), config, aligned)


@cached
def write_variant(dtype: str, cache: str, head_dim: int, config: Config, *, rotate: bool) -> Variant:
    """Return the compiled variant of the kernel that writes to the KV cache, and rotates before if `rotate`.

    dtype, cache  Triton type names of q, k, v and the result, and of the cache
    config        HEADS of a token per program, a power of two
    """
    types = {
        "q": f"*{dtype}", "k": f"*{dtype}", "v": f"*{dtype}", "cos": "*fp32", "sin": "*fp32", "q_out": f"*{dtype}",
        "slots": "*i64", "data": f"*{cache}", "scales": "*fp32", "heads": "i32", "kv_heads": "i32",
        "num_blocks": "i32", "q_stride": "i32", "k_stride": "i32", "v_stride": "i32",
    }  # fmt: skip
    constants = (*_halved(head_dim), ("ROTATE", rotate), ("INT8", cache == "i8"), ("BLOCK_TOKENS", BLOCK_TOKENS))
    aligned = _aligned(types, head_dim, "q_stride", "k_stride", "v_stride")
    return Variant("rotary_write" if rotate else "write_kv", _write, tuple(types.items()), constants, config, aligned)


def _halved(head_dim: int) -> tuple[tuple[str, int], ...]:
    return (("D", head_dim), ("HALF", triton.next_power_of_2(head_dim // 2)))


def _aligned(types: dict[str, str], head_dim: int, *strides: str) -> tuple[str, ...]:
    """Return the arguments that are multiples of 16; `strides` are multiples of the head dim."""
    pointers = tuple(name for name, kind in types.items() if kind.startswith("*"))
    return pointers + (strides if head_dim % 16 == 0 else ())


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, config: Config
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q [T, H, D] and k [T, KH, D] with the halves of each head rotated, as new contiguous tensors.

    cos, sin  fp32 [T, D / 2]
    """
    return _rotated(q, cos, sin, config), _rotated(k, cos, sin, config)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, config: Config) -> torch.Tensor:
    x = _whole_heads(x)
    num_tokens, heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_tokens:
        grid = (num_tokens, cdiv(heads, config["HEADS"]))
        rotary_variant(type_name(x), head_dim, config).launch(grid, x, cos, sin, out, heads, x.stride(0))
    return out


def rotary_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: KvCache,
    slots: torch.Tensor,
    config: Config,
) -> torch.Tensor:
    """Rotate q and k as `rotary` does, write k and v [T, KH, D] to the cache, and return the rotated q.

    slots  int64 [T], block * BLOCK_TOKENS + offset, all different; a negative one marks padding, which is not written
    """
    q, k, v = _whole_heads(q), _whole_heads(k), _whole_heads(v)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch_write(q, k, v, cos, sin, out, cache, slots, config, rotate=True)
    return out


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: KvCache, slots: torch.Tensor, config: Config) -> None:
    """Write k and v [T, KH, D] without rotation to their slots of the cache."""
    k, v = _whole_heads(k), _whole_heads(v)
    nothing = torch.empty(0, dtype=torch.float32, device=k.device)
    _launch_write(k, k, v, nothing, nothing, k, cache, slots, config, rotate=False)


def _launch_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: torch.Tensor,
    cache: KvCache,
    slots: torch.Tensor,
    config: Config,
    *,
    rotate: bool,
) -> None:
    num_tokens, kv_heads, head_dim = k.shape
    if not num_tokens:
        return
    heads = q.shape[1] if rotate else 0
    each = config["HEADS"]
    variant = write_variant(type_name(k), type_name(cache.data), head_dim, config, rotate=rotate)
    scales = slots.view(torch.float32) if cache.scales is None else cache.scales  # without scales any valid pointer
    grid = (num_tokens, cdiv(heads, each) + cdiv(kv_heads, each))
    variant.launch(
        grid, q, k, v, cos, sin, out, slots, cache.data, scales, heads, kv_heads, cache.data.shape[1],
        q.stride(0), k.stride(0), v.stride(0),
    )  # fmt: skip


def _whole_heads(x: torch.Tensor) -> torch.Tensor:
    """Return x itself if the heads of a token are contiguous, as in a view of a fused projection, or else a contiguous
    copy.
    """
    adjacent = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if adjacent else x.contiguous()


def quantize_kv_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize finite vectors fp32 [..., D] to codes int8 [..., D] and scales fp32 [...], as the reference of
    int8 KV.
    """
    scales = x.abs().amax(-1) / 127
    codes = (x / torch.where(scales > 0, scales, 1.0)[..., None]).round().clamp(-127, 127)
    return torch.where(scales[..., None] > 0, codes, 0.0).to(torch.int8), scales
