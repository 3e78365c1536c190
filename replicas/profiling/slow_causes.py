"""Causes why a module may be slow: each is one line of the table, decided from facts, and has its remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .module_facts import ModuleFacts


@dataclass(frozen=True, slots=True)
class SlowCause:
    """A cause of slowness. holds: whether facts show it. If several hold, the first in the table is reported."""

    name: str
    holds: Callable[[ModuleFacts], bool]
    remedy: str


def find_cause(facts: ModuleFacts, typical: ModuleFacts | None = None) -> SlowCause | None:
    """Return the first cause that these facts show. typical: facts of a sibling that is not slow; a cause that holds
    for it as well explains nothing and is skipped.
    """
    for cause in CAUSES:
        if cause.holds(facts) and not (typical and cause.holds(typical)):
            return cause
    return None


def _half_sums(facts: ModuleFacts) -> bool:
    """Return whether sums are in fp16 on a chip where that is slower than fp32, and that has no tensor cores for it."""
    chip = facts.capability
    return bool(chip and not chip.tensor_fma and chip.fp16_fma < chip.fp32_fma and facts.kernel.endswith("fp16"))


def _int4pack_in_fp32(facts: ModuleFacts) -> bool:
    return "torch-int4" in facts.kernel and facts.activations != "bfloat16"


def _refused_by_onednn(facts: ModuleFacts) -> bool:
    """Return whether oneDNN's int8 product was refused, on this CPU or because rounding these weights to int8 loses too
    much.
    """
    refused = facts.chosen.partition("(before it:")[2]
    return facts.kernel == "torch-dense" and not facts.native and "int8" in refused


def _rounds_too_much(facts: ModuleFacts) -> bool:
    return facts.native and facts.kernel.endswith("-dense") and "above its bound" in facts.chosen


def _written_out(facts: ModuleFacts) -> bool:
    """Return whether weights that are quantized in the checkpoint are held in 16 or 32 bits."""
    dense = facts.kernel.endswith("-dense") or facts.kernel.startswith("torch.matmul")
    return dense and 0 < facts.stored_bits < 12 <= facts.held_bits


def _no_c_kernels(facts: ModuleFacts) -> bool:
    return facts.capability is None and not facts.native and facts.kind != "lookup"


def _no_c_attention(facts: ModuleFacts) -> bool:
    return facts.kind == "attention" and facts.native and facts.kernel == "torch"


CAUSES: tuple[SlowCause, ...] = (
    SlowCause(
        "half-precision accumulate on a capability whose fp16 is slower than its fp32 (6.1)",
        _half_sums,
        "compute in fp32: `motley doctor` shows the policy of this GPU",
    ),
    SlowCause(
        "int4pack with activations that are not bf16: torch's int4 product is some 50 times slower there",
        _int4pack_in_fp32,
        "--dtype bfloat16, or another copy of the weights: --cpu-weights int8",
    ),
    SlowCause(
        "oneDNN's int8 product was refused, and there are no C kernels",
        _refused_by_onednn,
        "install a C compiler (gcc or clang): the C kernels hold weights as they are stored",
    ),
    SlowCause(
        "integer kernels were refused because they round these weights too much",
        _rounds_too_much,
        "quantize these layers with smaller groups, or live with it: the bound keeps the model's quality",
    ),
    SlowCause(
        "weights written out: quantized in the checkpoint, dense on the device",
        _written_out,
        "on a CPU --dtype bfloat16 or --cpu-weights int4; `motley doctor` shows what is chosen and why",
    ),
    SlowCause(
        "no C kernels: torch's operators do it",
        _no_c_kernels,
        "install gcc or clang, for example: apt-get install gcc",
    ),
    SlowCause(
        "the C kernel does not take this head_dim: torch's operators do attention",
        _no_c_attention,
        "none for this model: its head_dim is no multiple of 16",
    ),
    SlowCause(
        "kernel from the default table: no table has a config for such a shape",
        lambda facts: "default" in facts.configs,
        "motley kernels tune",
    ),
    SlowCause(
        "kernel from a static table: its config was chosen without a GPU",
        lambda facts: "static" in facts.configs,
        "motley kernels tune",
    ),
)
