"""C kernels of csrc/ as functions on tensors.

Every function takes contiguous tensors of fp32 or bf16 on the CPU, and checks what C cannot.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import torch

from ...batch import BLOCK_TOKENS, StepBatch
from .native_build import load_library

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # int8: only for a KV cache
_UNBOUNDED = 2**31 - 1
_TILE_ROWS = 64  # query rows (tokens times heads) per attention task

_P, _I, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


def _structure(name: str, **fields: type) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


def _named(names: str, kind: type) -> dict[str, type]:
    return dict.fromkeys(names.split(), kind)


GroupedArgs = _structure(
    "GroupedArgs",
    **_named("strips bias permutation", _P),
    **_named("outputs inputs group bits", _I),
)
DenseArgs = _structure("DenseArgs", **_named("weights bias", _P), **_named("outputs inputs type y_type", _I))
AttentionArgs = _structure(
    "AttentionArgs",
    **_named("q cache out positions tables tiles", _P),
    **_named("num_tiles table_stride q_stride heads kv_heads head_dim window type kv_type", _I),
    scale=_F,
)
RotaryArgs = _structure(
    "RotaryArgs",
    **_named("q k v cos sin slots q_out cache", _P),
    **_named("tokens heads kv_heads head_dim q_stride k_stride v_stride type kv_type", _I),
)


class NativeOutOfMemory(RuntimeError):
    """Failure of a kernel to allocate its scratch memory."""


class NativeKernels:
    """Loaded C kernels, with the number of threads that they may use."""

    def __init__(self, lib: ctypes.CDLL, threads: int) -> None:
        self.threads = threads
        self.grouped = lib.motley_linear
        self.grouped.argtypes = (_P, _P, _P, _I, _N, _N, _N)
        self.dense = lib.motley_dense
        self.dense.argtypes, self.dense.restype = (_P, _P, _P, _I, _N), None
        self._attention = lib.motley_attention
        self._attention.argtypes = (_P, _N)
        self._norm = lib.motley_norm
        self._norm.argtypes, self._norm.restype = (_P, _P, _P, _P, _P, _I, _I, _F, _N, _N), None
        self._silu_mul = lib.motley_silu_mul
        self._silu_mul.argtypes, self._silu_mul.restype = (_P, _P, _I, _I, _N, _N), None
        lib.motley_arithmetic.restype = ctypes.c_char_p
        self.arithmetic: str = lib.motley_arithmetic().decode()
        self._rotary_write = lib.motley_rotary_write
        self._rotary_write.argtypes, self._rotary_write.restype = (_P, _N), None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        y, n = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // n
        self._norm(
            x.data_ptr(), None, None, weight.data_ptr(), y.data_ptr(), rows, n, eps, TYPES[x.dtype], self.threads
        )
        return y

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        y, total, n = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
        pointers = (x.data_ptr(), residual.data_ptr(), total.data_ptr(), weight.data_ptr(), y.data_ptr())
        self._norm(*pointers, x.numel() // n, n, eps, TYPES[x.dtype], self.threads)
        return y, total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, both = gate_up.shape
        gate_up = gate_up.contiguous()
        y = gate_up.new_empty(rows, both // 2)
        self._silu_mul(gate_up.data_ptr(), y.data_ptr(), rows, both // 2, TYPES[y.dtype], self.threads)
        return y

    def rotary_write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Return rotated q [T, H, D]; write rotated k [T, KH, D] and v to their slots of the cache."""
        tokens, heads, dim = q.shape
        q, k, v = _packed(q), _packed(k), _packed(v)
        out = q.new_empty(tokens, heads, dim)
        args = RotaryArgs(
            *(q.data_ptr(), k.data_ptr(), v.data_ptr(), cos.data_ptr(), sin.data_ptr(), slots.data_ptr()),
            *(out.data_ptr(), cache.data_ptr(), tokens, heads, k.shape[1], dim),
            *(q.stride(0), k.stride(0), v.stride(0), TYPES[q.dtype], TYPES[cache.dtype]),
        )
        self._rotary_write(ctypes.byref(args), self.threads)
        return out

    def attention(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        batch: StepBatch,
        tiles: AttentionTiles,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Return attention [T, H, D] of q [T, H, D], of each sequence over its own KV blocks.

        `tiles` is the batch cut by `cut_tiles`. Raises NativeOutOfMemory.
        """
        tokens, heads, dim = q.shape
        q = _packed(q)
        out = q.new_empty(tokens, heads, dim)
        tables = batch.block_tables
        args = AttentionArgs(
            *(q.data_ptr(), cache.data_ptr(), out.data_ptr(), batch.positions.data_ptr()),
            *(tables.data_ptr(), tiles.spans.data_ptr()),
            *(len(tiles.spans), tables.stride(0), q.stride(0), heads, cache.shape[2], dim),
            *(window or _UNBOUNDED, TYPES[q.dtype], TYPES[cache.dtype], scale),
        )
        if self._attention(ctypes.byref(args), self.threads):
            raise NativeOutOfMemory(f"there is no memory for attention over {tokens} tokens")
        return out


class AttentionTiles:
    """Rows of a batch cut into pieces of one sequence each: spans int32 [n, 3] = (sequence, first row, rows)."""

    def __init__(self, query_starts: Sequence[int], tokens: int) -> None:
        self.tokens = tokens
        spans = [
            (index, row, min(tokens, end - row))
            for index, (start, end) in enumerate(itertools.pairwise(query_starts))
            for row in range(start, end, tokens)
        ]
        self.spans = torch.tensor(spans, dtype=torch.int32).reshape(-1, 3)


def cut_tiles(batch: StepBatch, heads_per_kv_head: int) -> AttentionTiles:
    """Cut a batch into tiles of a few tokens each, so that the rows of a tile share loads of the cache."""
    return AttentionTiles(batch.query_starts, max(1, _TILE_ROWS // heads_per_kv_head))


def supports_head_dim(head_dim: int) -> bool:
    return head_dim % BLOCK_TOKENS == 0


def _packed(x: torch.Tensor) -> torch.Tensor:
    """Return x [T, heads, D] with the heads of each token contiguous; tokens may lie apart."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def load_native_kernels() -> tuple[NativeKernels | None, str]:
    """Return the C kernels with as many threads as torch has now, or None and the reason."""
    lib, reason = load_library()
    return (None if lib is None else NativeKernels(lib, torch.get_num_threads())), reason
