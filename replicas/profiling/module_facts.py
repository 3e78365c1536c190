"""Facts about a part beside its time: which kernel computes it, in what arithmetic, from what weights. Causes are
decided by these alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...kernels.device.compute_capability import Capability
from ...kernels.device.device_context import DeviceContext
from ...kernels.device.device_spec import Arithmetic
from ...kernels.device.precision import ComputeUnit
from .instruments import ModuleKind, TimedModule
from .time_recorder import LastCall

if TYPE_CHECKING:
    from ...kernels.gpu.gpu_ops import GpuOps

# Operators of the GPU's tables, by the last word of a part's name.
_OPERATORS: Mapping[str, tuple[str, ...]] = {
    "norm": ("add_rms_norm",),
    "input_norm": ("rms_norm", "add_rms_norm"),
    "post_attention_norm": ("add_rms_norm",),
    "q_norm": ("head_rms_norm",),
    "k_norm": ("head_rms_norm",),
    "rotary_write": ("rotary_write",),
    "silu_mul": ("silu_mul",),
    "paged_attention": ("attention_decode", "attention_prefill"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """Facts about one timed part of a step, from which the cause of its slowness is decided.

    kernel       name in the op table; for a part that is no linear layer: "c", "torch" or "triton"
    chosen       what the operators said about their choices for it on this device
    configs      how the kernel's configs were found, on a GPU: "measured", "static", "default"; empty elsewhere
    activations  dtype of its input
    arithmetic   arithmetic of its products: "fp32", "bf16", "tensor-bf16"; "int8" for any integer kernel
    stored_bits  bits that a weight takes in the checkpoint, scales and the like counted; 0: there are none
    held_bits    bits that a weight takes on the device, all copies counted
    native       whether this CPU's operators have the C kernels
    """

    kind: ModuleKind
    kernel: str
    chosen: str = ""
    configs: frozenset[str] = field(default_factory=frozenset)
    activations: str = ""
    arithmetic: str = ""
    stored_bits: float = 0.0
    held_bits: float = 0.0
    native: bool = False
    capability: Capability | None = None


def module_facts(part: TimedModule, seen: LastCall, ops: Any) -> ModuleFacts:
    """Return the facts about a part. `ops`: the operators that it computes with, and with which it was `seen`."""
    activations = str(seen.dtype).removeprefix("torch.")
    common: dict[str, Any] = {"kind": part.kind, "activations": activations}
    if part.stored is not None:
        common |= {"stored_bits": part.stored.bits, "held_bits": 8 * part.linear.held.nbytes / part.stored.weights}
    if hasattr(ops, "device_context"):  # GpuOps: importing it here would import Triton
        return _on_gpu(part, seen, ops, common)
    native = ops.arithmetic.startswith("cpu-c-")
    kernel = _linears(part) or ("c" if native and part.kind != "lookup" else "torch")
    if part.kind == "attention" and "attention" in ops.choices:  # this choice is only there if it is not the C kernel
        kernel = "torch"
    exact = {"float32": "fp32", "bfloat16": "bf16"}.get(activations, "")
    whole = any(kind in kernel for kind in ("int4", "int8"))
    return ModuleFacts(
        kernel=kernel,
        chosen=_chosen(part, kernel, ops.choices),
        arithmetic="int8" if whole else exact,
        native=native,
        **common,
    )


def _on_gpu(part: TimedModule, seen: LastCall, ops: GpuOps, common: dict[str, Any]) -> ModuleFacts:
    kernel = _linears(part) or ("torch" if part.kind == "lookup" else "triton")
    return ModuleFacts(
        kernel=kernel,
        chosen=_chosen(part, kernel, ops.choices),
        configs=frozenset(_configs(part, seen, ops)),
        arithmetic=_unit(part, kernel, ops.device_context),
        capability=ops.device_context.policy.capability,
        **common,
    )


def _unit(part: TimedModule, kernel: str, device_context: DeviceContext) -> Arithmetic:
    """Return the best arithmetic that the policy allows for the part: for a linear layer the fastest of its units."""
    policy = device_context.policy
    if part.kind == "attention":
        return policy.attention_unit.arithmetic
    if part.kind != "linear":
        return "fp32"
    units: tuple[ComputeUnit, ...] = (policy.decode, policy.prefill)
    if kernel == "w8a8":
        units = policy.int8_units
    elif kernel == "fp8" and policy.fp8:
        units = (policy.fp8,)
    return max((unit.arithmetic for unit in units), key=lambda each: device_context.about.rates[each])


def _linears(part: TimedModule) -> str:
    """Return the names of a joined layer's kernels, each once; "" for a part that is no linear layer."""
    if part.linear is None:
        return ""
    return " + ".join(dict.fromkeys(linear.kernel for linear in _each(part)))


def _each(part: TimedModule) -> list[Any]:
    return list(getattr(part.linear, "parts", (part.linear,)))


def _chosen(part: TimedModule, kernel: str, choices: Mapping[str, str]) -> str:
    """Return what was said about this kernel for layers or for the head; for a part that is no linear layer, about all
    kernels here.
    """
    if part.kind != "linear":
        key = "attention" if part.kind == "attention" and "attention" in choices else "cpu kernels"
        return choices.get(key, "")
    role = "head" if part.name == "head" else "layer"
    said = [each for key, text in choices.items() if key.startswith(f"{role}, ") for each in text.split(" | ")]
    names = kernel.split(" + ")
    of_it = [each for each in said if each.startswith((*(f"{name}:" for name in names), "written out"))]
    more = f" (and {len(of_it) - 1} more like it)" if of_it[1:] else ""
    return of_it[0] + more if of_it else ""


def _configs(part: TimedModule, seen: LastCall, ops: GpuOps) -> Iterator[str]:
    """Yield the sources of the configs that were used. An int4 layer reports its own; other operators' are found by
    name.
    """
    if part.linear is not None:
        for linear in _each(part):
            if hasattr(linear, "looked_up"):
                yield linear.looked_up(seen.rows)[1].source
            else:
                kernel = linear.operator(seen.rows) if hasattr(linear, "operator") else linear.kernel
                yield from (choice.source for choice in ops.configs.used(kernel, seen.rows))
    for name in _OPERATORS.get(part.name.rpartition(".")[2], ()):
        yield from (choice.source for choice in ops.configs.used(name, seen.rows))
