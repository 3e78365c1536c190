"""Operators on a CPU, by C kernels or by torch."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .. import reference
from ..batch import StepBatch
from ..canonical_weights import Weight
from ..contract import CpuWeights, KvDtype, Linear, Numerics, Role
from ..packed_layer import PackedLayer
from . import torch_attention
from .c_kernels.native_kernels import AttentionTiles, NativeKernels, cut_tiles, supports_head_dim
from .layers.linear_choice import choose_linear, weight_kind
from .layers.linear_settings import CpuLinearSettings
from .layers.native_linear import NativeDenseLinear, NativeGroupedLinear, restore_linear
from .memory import lazy_pages


class CpuOps:
    """Implementation of `contract.Ops` with the C kernels, or with torch's operators where there are none."""

    def __init__(
        self,
        dtype: torch.dtype,
        numerics: Numerics,
        weights: CpuWeights | None,
        native: NativeKernels | None,
        native_reason: str,
        kv_dtype: KvDtype | None = None,
    ) -> None:
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.numerics = numerics
        self._kv_dtype = kv_dtype
        self._choices = {"cpu kernels": native_reason}
        self.choices: Mapping[str, str] = self._choices
        self._noting = threading.Lock()
        self._native = native
        self._uses_torch = native is None
        self._layer = CpuLinearSettings(dtype, dtype, numerics, weights, native)
        self._head = replace(self._layer, out_dtype=torch.float32)
        self._cut: tuple[StepBatch, AttentionTiles] | None = None

    @property
    def arithmetic(self) -> str:
        kernels = f"c-{self._native.arithmetic}" if self._native else f"torch-{torch.backends.cpu.get_cpu_capability()}"
        dtype = str(self.dtype).removeprefix("torch.")
        kv = f"-kv-{self._kv_dtype}" if self._kv_dtype else ""
        return f"cpu-{kernels}-{dtype}-{self.numerics}-{self._layer.weights or 'auto'}{kv}".lower()

    @property
    def torch_threads(self) -> int:
        return 1 if self._native and not self._uses_torch else torch.get_num_threads()

    def linear(self, weight: Weight, role: Role = "layer") -> Linear:
        linear, why = choose_linear(weight, role, self._head if role == "head" else self._layer)
        name = f"{role}, {weight_kind(weight)}"
        with self._noting:  # since several threads repack layers at once
            self._uses_torch |= not linear.kernel.startswith("c-")
            cached = self._choices.get(name, "")
            if why not in cached:
                self._choices[name] = f"{cached} | {why}" if cached else why
        return linear

    @property
    def layout(self) -> str | None:
        if self._native is None:
            return None
        settings = f"{self.dtype}|{self.numerics}|{self._layer.weights}"
        return f"{settings}|{self._choices['cpu kernels']}|torch {torch.__version__}|{_sources_digest()}"

    def keeps(self, linear: Linear) -> bool:
        return isinstance(linear, NativeGroupedLinear | NativeDenseLinear)

    def packed(self, linear: Linear) -> PackedLayer | None:
        return linear.packed if isinstance(linear, NativeGroupedLinear | NativeDenseLinear) else None

    def restored(self, packed: PackedLayer, role: Role) -> Linear:
        return restore_linear(packed, self._head if role == "head" else self._layer)

    def restore_choices(self, choices: Mapping[str, str]) -> None:
        self._choices |= choices

    def allocate_kv(self, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int) -> list[torch.Tensor]:
        if self._native and not supports_head_dim(head_dim):
            self._choices["attention"] = f"torch: head_dim {head_dim} is no multiple of 16"
        dtype = torch.int8 if self._kv_dtype else self.dtype
        caches = [torch_attention.allocate_cache(num_blocks, num_kv_heads, head_dim, dtype) for _ in range(num_layers)]
        lazy_pages.claim_pages(caches)
        return caches

    def kv_parts(self, cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (cache,)

    def kv_vectors(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        [cache] = parts
        found = torch_attention.key_view(cache).transpose(2, 3), torch_attention.value_view(cache)
        return (*found, *torch_attention.scale_view(cache).unbind(1)) if cache.dtype == torch.int8 else found

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, batch: StepBatch) -> None:
        torch_attention.write_cache(k, v, cache, batch)

    def rotary_write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: torch.Tensor,
        batch: StepBatch,
    ) -> torch.Tensor:
        if self._native:
            return self._native.rotary_write(q, k, v, cos, sin, cache, batch.slots)
        q, k = self.rotary(q, k, cos, sin)
        self.write_kv(k, v, cache, batch)
        return q

    def attention(
        self, q: torch.Tensor, cache: torch.Tensor, batch: StepBatch, scale: float, window: int | None
    ) -> torch.Tensor:
        if self._native is None or not supports_head_dim(q.shape[2]):
            return torch_attention.attention(q, cache, batch, scale, window)
        cached = self._cut  # read once, since several engines in one process may share these operators
        if cached is None or cached[0] is not batch:  # computed once per step, not once per layer
            self._cut = cached = batch, cut_tiles(batch, q.shape[1] // cache.shape[2])
        return self._native.attention(q, cache, batch, cached[1], scale, window)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._native.rms_norm(x, weight, eps) if self._native else reference.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._native:
            return self._native.add_rms_norm(x, residual, weight, eps)
        return reference.add_rms_norm(x, residual, weight, eps)

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.rotary(q, k, cos, sin)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._native.silu_mul(gate_up) if self._native else reference.silu_mul(gate_up)


@functools.cache
def _sources_digest() -> str:
    """Digest of the code that packs weights: after any change of it, stored layers have another layout."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
