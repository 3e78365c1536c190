"""Engines whose weights are in tiers of the stand-in for a GPU, and operators whose layers can be kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from late_device import LateDevice, LateOps

from motley.kernels.canonical_weights import DenseWeight, Weight
from motley.kernels.contract import Linear, Role
from motley.kernels.cpu.layers.torch_linear import TorchDenseLinear
from motley.kernels.layer_memory import LayerMemory
from motley.kernels.packed_layer import PackedLayer, contiguous_on_host
from motley.replicas.capacity.device_fit import build_meta_decoder
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.execution.swapper import pinned_bytes
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.offload.device.device_tier import DeviceTier
from motley.replicas.offload.planning.device_plan import DevicePlan
from motley.replicas.offload.planning.disk_plan import WeightSizes
from motley.replicas.offload.planning.weight_budget import weight_sizes

PROMPTS = [list(range(3, 40)), [7, 8, 9], list(range(100, 120))]
LAYERS = 6
AMPLE = 2**40


class Plain(TorchDenseLinear):
    """A linear that can be kept as it is."""

    @property
    def packed(self) -> PackedLayer:
        return PackedLayer(self.kernel, {}, contiguous_on_host(weight=self._weight, bias=self._bias))


class KeptOps(LateOps):
    """Operators whose layers can be kept, as a GPU's."""

    @property
    def layout(self) -> str | None:
        return "plain"

    def for_meta_device(self) -> KeptOps:
        return KeptOps()

    def linear(self, weight: Weight, role: Role = "layer") -> Linear:
        return Plain(weight, self._head if role == "head" else self._layer)

    def keeps(self, linear: Linear) -> bool:
        return isinstance(linear, Plain)

    def packed(self, linear: Linear) -> PackedLayer | None:
        return linear.packed if isinstance(linear, Plain) else None

    def restored(self, packed: PackedLayer, role: Role) -> Linear:
        made = self.linear(DenseWeight(packed.tensors["weight"], packed.tensors.get("bias")), role)
        made.held = LayerMemory(made.held.nbytes)
        return made


def sizes_in(folder: Path) -> WeightSizes:
    found = inspect_checkpoint(folder)
    return weight_sizes(build_meta_decoder(found.config, found.format, found.tensors, KeptOps()))


def budgets(folder: Path, kind: str) -> dict[str, int]:
    """Settings of a plan with no layer that stays, or of "both" with one, and the others where `kind` says."""
    sizes = sizes_in(folder)
    every = DevicePlan(sizes, ("disk",) * LAYERS)
    device = every.device_bytes + max(sizes.layers) * (kind == "both")
    two = pinned_bytes(2 * max(sizes.layers), 1)
    host = {"host": AMPLE, "disk": every.host_bytes, "both": every.host_bytes + two}[kind]
    return {"weights_memory_bytes": device, "weights_host_memory_bytes": host}


@contextmanager
def engine(folder: Path, device: LateDevice, **settings: Any) -> Iterator[Engine]:
    cache = folder.parent / "cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    given = {"dtype": "float32", "threads": 1, "kv_memory_bytes": 2**20, "graphs": False, "weights_cache": str(cache)}
    with Engine(folder, ops=KeptOps(), accelerator=device, **{**given, **settings}) as made:
        yield made


def said(made: Engine) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens of several prompts at once, and logits of one."""
    responses = made.generate(PROMPTS, made.sampling(temperature=0.0, max_tokens=8, seed=0, ignore_eos=True))
    return [each.token_ids for each in responses], made._built.logits(tuple(PROMPTS[0]))


def tier_of(made: Engine) -> DeviceTier:
    assert made._built.weights is not None
    tier = made._built.weights.loaded.decoder.tier
    assert isinstance(tier, DeviceTier)
    return tier
