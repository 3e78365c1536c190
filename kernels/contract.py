"""The operators a model is made of. A model calls only this protocol, whatever device stands behind it."""

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
    """y [M, N] = x [M, K] @ w.T + bias, for any M >= 1; in the dtype of x, or fp32 for the head."""

    kernel: str  # its name in the op table
    held: LayerMemory  # what it keeps, all copies counted

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Ops(Protocol):
    """One device's operators. Activations are `dtype`; T is the number of new tokens in the step.

    numerics "exact": a row's result does not depend on what else is in the batch, on chunking or on prefix
    hits. "fast": may switch kernels by M, within the bound that each kernel states.
    """

    device: torch.device
    dtype: torch.dtype
    numerics: Numerics
    choices: Mapping[str, str]  # what was chosen for each op -> why

    @property
    def arithmetic(self) -> str:
        """In a few words, whatever rounds in its own way: ops that agree in it give the same bits."""
        ...

    @property
    def torch_threads(self) -> int:
        """Threads that torch should have once the model is loaded.

        1 where our own kernels do the work with threads of their own: two pools on the same cores hold each
        other up.
        """
        ...

    def linear(self, weight: Weight, role: Role = "layer") -> Linear:
        """Repack a weight for this device. "head": the vocabulary projection.

        Of an outline (tensors on the meta device) it makes a layer that computes nothing, and keeps what that of
        the weight itself would keep; what depends on values is taken as it mostly is.
        """
        ...

    def allocate_kv(self, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int) -> list[torch.Tensor]:
        """One cache tensor per layer, in whatever layout this device's attention wants."""
        ...

    def kv_parts(self, cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views [num_blocks, ...] of a layer's cache, contiguous but for their first dimension: together all of it."""
        ...

    def kv_vectors(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Views of a layer's keys and values, each [blocks, KH, BLOCK_TOKENS, D]; of int8 also of their scales, fp32
        [blocks, KH, BLOCK_TOKENS].

        parts  as `kv_parts` gives them, or alike with other blocks: they are contiguous but for their first dimension
        """
        ...

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, batch: StepBatch) -> None:
        """k, v [T, KH, D] into the slots of this step."""
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
        """`rotary`, then `write_kv` of the rotated keys and of v, in one pass; returns the rotated q."""
        ...

    def attention(
        self, q: torch.Tensor, cache: torch.Tensor, batch: StepBatch, scale: float, window: int | None
    ) -> torch.Tensor:
        """Causal attention of q [T, H, D] over each sequence's own context; returns [T, H, D].

        window: a query at position p sees positions p - window + 1 .. p; None sees all.
        """
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., N] normalised over its last dimension, in fp32, times weight [N]."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        ...

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate halves: q [T, H, D], k [T, KH, D], cos and sin fp32 [T, D / 2] already at the positions."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up for gate_up [T, 2 * I] = [gate | up]; returns [T, I]."""
        ...


@runtime_checkable
class MetaOpsProvider(Protocol):
    """Operators whose device keeps outlines from being made by them."""

    def for_meta_device(self) -> Ops:
        """The same for outlines; what these choose is not told by the others."""
        ...


@runtime_checkable
class DeviceOps(Ops, Protocol):
    """Of a device that chooses tokens itself."""

    def sample(
        self, logits: torch.Tensor, rows: SamplingRows, filtered: bool, own: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids int64 [R] and log-probabilities fp32 [R], NaN where logits fp32 [R, V] are not finite.

        filtered  whether a row may ask for top_k or top_p
        own       the model's own logits, where these are not: log-probabilities are in them
        """
        ...

    def penalised(self, logits: torch.Tensor, history: torch.Tensor, rows: PenaltyRows) -> torch.Tensor:
        """Logits fp32 [R, V] under penalties, for `sample`.

        history  int16 or int32 [H, V]: how often a token is in an output, less 2**15 or 2**31 if it is in the prompt
        """
        ...
