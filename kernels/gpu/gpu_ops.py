"""Operators on a GPU: each launches a kernel of ours with the config that the tuned tables have for it."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from ..attention.attention_decode import decode_attention
from ..attention.attention_prefill import prefill_attention
from ..attention.attention_tile import HEAD_DIMS
from ..attention.kv_cache import KvCache
from ..batch import StepBatch
from ..canonical_weights import DenseWeight, Fp8Weight, GroupedWeight, Weight
from ..contract import KvDtype, Linear, Numerics, Role
from ..device.device_context import DeviceContext
from ..device.dtypes import TORCH_DTYPES
from ..launch.kernel_operation import SHORTEST_CONTEXT, round_up_power_of_two
from ..launch.variant import Config
from ..packed_layer import PackedLayer
from ..pointwise import activation, norm, rotary
from ..sampling.sample import PenaltyRows, SamplingRows, penalize_logits, sample
from .config_cache import ConfigCache
from .gpu_linear import DenseLinear, Fp8Linear, Int8Linear
from .int4_layer import Int4Linear

_QUANTIZED: dict[str, type[Int4Linear | Int8Linear | Fp8Linear]] = {
    Int4Linear.LAYOUT: Int4Linear, Int8Linear.LAYOUT: Int8Linear, Fp8Linear.LAYOUT: Fp8Linear,
}  # fmt: skip
_KINDS = {Int4Linear.LAYOUT: "int4", Int8Linear.LAYOUT: "int8", Fp8Linear.LAYOUT: "fp8", DenseLinear.LAYOUT: "dense"}
_WRITTEN_OUT = "written out"  # prefix of the reason where no kernel of ours takes the weight


@dataclass(frozen=True, slots=True)
class _DeviceBatch:
    """Arrays that the attention kernels read on the device, made once per step and not once per layer.

    context_lens  int32 [S]
    query_starts  int32 [S - num_decodes + 1], for the sequences with several new tokens, from 0
    max_new       largest number of new tokens of these sequences
    """

    context_lens: torch.Tensor
    query_starts: torch.Tensor
    max_new: int


class GpuOps:
    """Implementation of `contract.DeviceOps` and `PackedLayerOps` with Triton kernels.

    KV is held in the dtype of activations, or in int8 with a scale per vector.
    """

    numerics: Numerics = "fast"
    torch_threads = 1

    def __init__(self, device_context: DeviceContext, kv_dtype: KvDtype | None = None) -> None:
        self.device = device_context.device
        self.dtype = TORCH_DTYPES[device_context.policy.storage]
        self._device_context = device_context
        self._kv_dtype = kv_dtype
        self._kv: tuple[Literal["half", "int8"], str] = (
            ("int8", "int8") if kv_dtype else ("half", device_context.policy.storage)
        )
        self._heads = (0, 0)  # number of KV heads, and head dim
        self._configs = ConfigCache(device_context)
        self._choices: dict[str, str] = {}
        self.choices: Mapping[str, str] = self._choices
        self._last: tuple[StepBatch, _DeviceBatch] | None = None

    @property
    def device_context(self) -> DeviceContext:
        return self._device_context

    @property
    def configs(self) -> ConfigCache:
        """Cache of the launch configs that these operators have looked up in tuned tables."""
        return self._configs

    @property
    def arithmetic(self) -> str:
        kv = f"-kv-{self._kv_dtype}" if self._kv_dtype else ""
        return f"gpu-{self._device_context.policy.capability}-{self._device_context.policy.storage}-{self.numerics}{kv}"

    def linear(self, weight: Weight, role: Role = "layer") -> Linear:
        if role == "layer" and not isinstance(weight, DenseWeight):
            kind = "fp8" if isinstance(weight, Fp8Weight) else f"int{weight.bits}"
            try:
                made = self._quantized(weight)
            except ValueError as error:  # a shape or a capability that the kernels do not support
                self._choices[f"{role}, {kind}"] = f"{_WRITTEN_OUT}: {error}"
            else:
                self._choices.setdefault(f"{role}, {kind}", made.kernel)
                return made
        dense = weight if isinstance(weight, DenseWeight) else _dense(weight)
        plain = DenseLinear(dense, self._device_context, _out_dtype(role))
        self._choices.setdefault(f"{role}, dense", plain.kernel)
        return plain

    @property
    def layout(self) -> str:
        """Digest of the packed layout.

        It does not depend on tuned tables, since kernels and configs are looked up again for a restored layer.
        """
        policy = self._device_context.policy
        int8 = "none" if policy.int8 is None else policy.int8.arithmetic
        units = f"{policy.storage}|{policy.compute}|int8 {int8}|fp8 {policy.fp8 is not None}"
        return f"gpu {policy.capability}|{units}|torch {torch.__version__}|{_sources_digest()}"

    def keeps(self, linear: Linear) -> bool:
        return isinstance(linear, Int4Linear | Int8Linear | Fp8Linear | DenseLinear)

    def packed(self, linear: Linear) -> PackedLayer | None:
        return linear.packed if isinstance(linear, Int4Linear | Int8Linear | Fp8Linear | DenseLinear) else None

    def restored(self, packed: PackedLayer, role: Role) -> Linear:
        made = self._restored(packed, role)
        self._choices.setdefault(f"{role}, {_KINDS[packed.kernel]}", made.kernel)
        return made

    def restore_choices(self, choices: Mapping[str, str]) -> None:
        """Record which weights were dequantized in full, and why; all other choices are made again."""
        self._choices |= {what: why for what, why in choices.items() if why.startswith(_WRITTEN_OUT)}

    def for_meta_device(self) -> GpuOps:
        return GpuOps(replace(self._device_context, device=torch.device("meta")), self._kv_dtype)

    def allocate_kv(self, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int) -> list[torch.Tensor]:
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim: {head_dim} has no kernel; expected one of {HEAD_DIMS}")
        self._heads = num_kv_heads, head_dim
        dtype = torch.int8 if self._kv_dtype else self.dtype
        sizes = (num_blocks, num_kv_heads, head_dim, dtype, self.device)
        return [KvCache.allocate_whole(*sizes) for _ in range(num_layers)]

    def kv_parts(self, cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kv = self._cache(cache)
        return (*kv.data, *(() if kv.scales is None else kv.scales))

    def kv_vectors(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(parts)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, batch: StepBatch) -> None:
        config = self._configs.of("write_kv", **self._sizes(k, k), kv=self._kv[0])
        rotary.write_kv(k, v, self._cache(cache), batch.slots, config)

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
        config = self._configs.of("rotary_write", **self._sizes(q, k), kv=self._kv[0])
        return rotary.rotary_write(q, k, v, cos, sin, self._cache(cache), batch.slots, config)

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rotary.rotary(q, k, cos, sin, self._configs.of("rotary", **self._sizes(q, k), kv="none"))

    def attention(
        self, q: torch.Tensor, cache: torch.Tensor, batch: StepBatch, scale: float, window: int | None
    ) -> torch.Tensor:
        """Return attention [T, H, D], see `Ops.attention`.

        Sequences with one new token use the decode kernel, the others the prefill kernel.
        """
        kv, here, q = self._cache(cache), self._on_device(batch), q.contiguous()
        out, decodes, tables = torch.empty_like(q), batch.num_decodes, batch.block_tables
        sizes: dict[str, int | str] = {
            "heads": q.shape[1], "kv_heads": kv.data.shape[2], "dim": q.shape[2], "window": window or 0,
            "kv": self._kv[1],
        }  # fmt: skip
        if decodes:
            context = round_up_power_of_two(max(batch.context_lens[:decodes]), SHORTEST_CONTEXT)
            config = self._configs.of(
                "attention_decode", batch=round_up_power_of_two(decodes), context=context, **sizes
            )
            parts: tuple[torch.Tensor, ...] = q, tables, here.context_lens, out
            if decodes < batch.num_sequences:
                parts = tuple(part[:decodes] for part in parts)
            decode_attention(
                parts[0], kv, parts[1], parts[2], scale, window, self._device_context.policy.attention, config, parts[3]
            )  # fmt: skip
        if decodes < batch.num_sequences:
            context = round_up_power_of_two(max(batch.context_lens[decodes:]), SHORTEST_CONTEXT)
            count = round_up_power_of_two(batch.num_sequences - decodes)
            config = self._configs.of(
                "attention_prefill", batch=count, context=context, new=round_up_power_of_two(here.max_new), **sizes
            )
            prefill_attention(
                q[decodes:], kv, tables[decodes:], here.query_starts, here.context_lens[decodes:], here.max_new, scale,
                window, config, out[decodes:],
            )  # fmt: skip
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dim() == 3:
            config = self._configs.of("head_rms_norm", d=x.shape[2], h=x.shape[1], t=round_up_power_of_two(x.shape[0]))
        else:
            columns = _check_column_multiple("hidden_size", x.shape[-1])
            config = self._configs.of("rms_norm", n=columns, t=round_up_power_of_two(x.numel() // columns))
        return norm.rms_norm(x, weight, eps, config)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config = self._configs.of("add_rms_norm", n=x.shape[-1], t=round_up_power_of_two(x.shape[0]))
        return norm.add_rms_norm(x, residual, weight, eps, config)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        width = _check_column_multiple("intermediate_size", gate_up.shape[1] // 2)
        config = self._configs.of("silu_mul", n=width, t=round_up_power_of_two(gate_up.shape[0]))
        return activation.silu_mul(gate_up, config)

    def sample(
        self, logits: torch.Tensor, rows: SamplingRows, filtered: bool, own: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sampled token ids int64 [R] and their log-probabilities fp32 [R], without waiting for the device.

        A log-probability is NaN where the row's logits are not finite.

        filtered  whether any row may ask for top_k or top_p
        own       the model's own logits where `logits` are altered ones; log-probabilities are computed from them
        """
        return sample(logits, rows, self._cut(logits, filtered), own=own, top_k=filtered, top_p=filtered)

    def penalised(self, logits: torch.Tensor, history: torch.Tensor, rows: PenaltyRows) -> torch.Tensor:
        """Return logits fp32 [R, V] with penalties applied; see `sample.penalize_logits` for `history`."""
        return penalize_logits(logits, history, rows, self._cut(logits, filtered=False))

    def _cut(self, logits: torch.Tensor, filtered: bool) -> Config:
        filters = "all" if filtered else "none"
        return self._configs.of("sample", filters=filters, r=round_up_power_of_two(logits.shape[0]), v=logits.shape[1])

    def _quantized(self, weight: GroupedWeight | Fp8Weight) -> Linear:
        if isinstance(weight, Fp8Weight):
            return Fp8Linear(weight, self._device_context, self._configs)
        if weight.bits == 4:
            return Int4Linear([weight], self._device_context, self._configs)
        return Int8Linear(weight, self._device_context, self._configs)

    def _restored(self, packed: PackedLayer, role: Role) -> Linear:
        if packed.kernel == DenseLinear.LAYOUT:
            return DenseLinear.of(packed, self._device_context, _out_dtype(role))
        return _QUANTIZED[packed.kernel].of(packed, self._device_context, self._configs)

    def _sizes(self, q: torch.Tensor, k: torch.Tensor) -> dict[str, int]:
        return {"d": k.shape[2], "h": q.shape[1], "kh": k.shape[1], "t": round_up_power_of_two(k.shape[0])}

    def _cache(self, tensor: torch.Tensor) -> KvCache:
        return KvCache.of(tensor, *self._heads)

    def _on_device(self, batch: StepBatch) -> _DeviceBatch:
        cached = self._last  # read once, since several engines in one process may share these operators
        if cached is None or cached[0] is not batch:
            starts = batch.query_starts[batch.num_decodes :]
            if batch.lengths is not None and batch.num_decodes == batch.num_sequences:
                lengths, begins = batch.lengths, batch.lengths[:0]
            else:
                numbers = [*batch.context_lens, *(start - starts[0] for start in starts)]
                both = self._moved(torch.tensor(numbers, dtype=torch.int32))
                lengths, begins = both[: batch.num_sequences], both[batch.num_sequences :]
            new = [after - before for before, after in itertools.pairwise(starts)]
            self._last = cached = batch, _DeviceBatch(lengths, begins, max(new, default=0))
        return cached[1]

    def _moved(self, values: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to the device without waiting for the work that the device is doing."""
        return values.pin_memory().to(self.device, non_blocking=True) if self._device_context.real else values


def _out_dtype(role: Role) -> torch.dtype | None:
    """Dtype of a dense layer's result; None: the dtype of its input."""
    return torch.float32 if role == "head" else None


@functools.cache
def _sources_digest() -> str:
    """Digest of the code that packs weights and of the kernels that read them.

    After any change of it, stored layers have another layout.
    """
    kernels = Path(__file__).parent.parent
    files = [kernels / "packed_layer.py", kernels / "canonical_weights.py"]
    for folder in ("gpu", "w4a16", "w8a8"):
        files += sorted((kernels / folder).glob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _check_column_multiple(name: str, columns: int) -> int:
    """Return the number of columns. Raises ValueError unless it is a multiple of 16.

    The kernels are compiled for rows that begin at multiples of 16 elements.
    """
    if columns % 16:
        raise ValueError(f"{name}: {columns} is not a multiple of 16, as the GPU kernels need")
    return columns


def _dense(weight: GroupedWeight | Fp8Weight) -> DenseWeight:
    return DenseWeight(weight.dequantize(), weight.bias)
