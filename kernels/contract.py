"""Protocols of the operators that a model is made of; a model calls only these, whatever device computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch

from .batch import StepBatch
from .canonical_weights import Weight
from .layer_memory import LayerMemory

if TYPE_CHECKING:
    from .sampling.sample import PenaltyRows, SamplingRows

Numerics = Literal["exact", "fast"]
KvDtype = Literal["int8"]
CpuWeights = Literal["int4", "int8", "both", "dense"]
Role = Literal["layer", "head"]


class Linear(Protocol):
    """Linear layer: y [M, N] = x [M, K] @ w.T + bias for any M >= 1, in the dtype of x, or in fp32 for the vocabulary
    head.
    """

    kernel: str  # name of its kernel in the op table
    held: LayerMemory  # memory that the layer keeps, all copies counted

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Ops(Protocol):
    """Operators of one device, with activations in `dtype`; T is the number of new tokens in the step.

    With `numerics` "exact" the result of a row does not depend on the other rows of the batch, on the chunking of
    prompts or on prefix cache hits. With "fast" kernels may be chosen by M, within the error bound that each kernel
    states.
    """

    device: torch.device
    dtype: torch.dtype
    numerics: Numerics
    choices: Mapping[str, str]  # op -> the kernel that was chosen for it, and why

    @property
    def arithmetic(self) -> str:
        """Short description of everything that affects rounding: operators that are equal in it give the same bits."""
        ...

    @property
    def torch_threads(self) -> int:
        """Number of threads that torch should have once the model is loaded.

        It is 1 where our own kernels compute with their own threads: two thread pools on the same cores slow each other
        down.
        """
        ...

    def linear(self, weight: Weight, role: Role = "layer") -> Linear:
        """Return a linear layer made by repacking a weight for this device.

        A weight on the meta device gives a layer that computes nothing and whose `held` says what the layer of the real
        weight would keep; where that depends on values, the usual case is assumed.

        role  "head" for the projection to the vocabulary, "layer" for all others
        """
        ...

    def allocate_kv(self, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int) -> list[torch.Tensor]:
        """Allocate one KV cache tensor per layer, in the layout that this device's attention reads."""
        ...

    def kv_parts(self, cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return views [num_blocks, ...] that together cover one layer's cache; each is contiguous but for its first
        dimension.
        """
        ...

    def kv_vectors(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return views of one layer's keys and values, each [blocks, KH, BLOCK_TOKENS, D].

        An int8 cache gives two further views, of the scales of keys and of values: fp32 [blocks, KH, BLOCK_TOKENS].

        parts  tensors from `kv_parts`, or of the same form with other blocks: contiguous but for their first dimension
        """
        ...

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, batch: StepBatch) -> None:
        """Write k and v [T, KH, D] into the KV cache slots of this step."""
        ...

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
        """Apply `rotary` to q and k, write the rotated keys and v to the cache in the same pass, and return the rotated
        q.
        """
        ...

    def attention(
        self, q: torch.Tensor, cache: torch.Tensor, batch: StepBatch, scale: float, window: int | None
    ) -> torch.Tensor:
        """Return the causal attention [T, H, D] of q [T, H, D], of each sequence over its own context.

        window  a query at position p sees positions p - window + 1 .. p; None: all up to p
        """
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x [..., N] normalised by the root mean square of its last dimension, in fp32, times weight [N]."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rms_norm(x + residual) and x + residual, both in the shape of x."""
        ...

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q [T, H, D] and k [T, KH, D] with rotary position embedding applied to halves of each head.

        cos, sin  fp32 [T, D / 2], already selected for the positions
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up [T, I] for gate_up [T, 2 * I] = [gate | up]."""
        ...


@runtime_checkable
class MetaOpsProvider(Protocol):
    """Operators of a device that cannot make meta models, and that provide other operators for these."""

    def for_meta_device(self) -> Ops:
        """Return equivalent operators for models on the meta device.

        The choices of kernels that these record are their own: they do not appear in the `choices` of the original
        ones.
        """
        ...


@runtime_checkable
class DeviceOps(Ops, Protocol):
    """Operators of a device that samples tokens itself."""

    def sample(
        self, logits: torch.Tensor, rows: SamplingRows, filtered: bool, own: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sampled token ids int64 [R] and their log-probabilities fp32 [R] for logits fp32 [R, V].

        A log-probability is NaN where the row's logits are not finite.

        filtered  whether any row may ask for top_k or top_p
        own       the model's own logits where `logits` are altered ones; log-probabilities are computed from them
        """
        ...

    def penalised(self, logits: torch.Tensor, history: torch.Tensor, rows: PenaltyRows) -> torch.Tensor:
        """Return logits fp32 [R, V] with penalties applied, as input of `sample`.

        history  int16 or int32 [H, V]: how often a token is in an output, minus 2**15 or 2**31 if it is in the prompt
        """
        ...
