"""Facts of `motley doctor` about a GPU, present or only named: precision, kernels and their configs, torch's fit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..replicas.host.pip_command import pip_install_command
from .fact import DoctorFact

if TYPE_CHECKING:
    from ..kernels.device.device_lookup import DeviceProperties
    from ..kernels.device.device_spec import DeviceSpec
    from ..kernels.device.precision import ComputeUnit, PrecisionPolicy
    from ..kernels.launch.kernel_operation import KernelOperation

GIB = 2**30
_CHOICES = ("storage", "compute", "accumulate", "prefill", "decode", "int8", "fp8", "attention", "pipelined")


def gpu_facts() -> Iterator[DoctorFact]:
    """Yield facts of every GPU that torch finds; without any, of torch's build, and of GPUs that a CPU build
    cannot see.
    """
    import torch

    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        yield DoctorFact("Devices", "cuda", f"none; this torch is {built}", "note")
        if not torch.version.cuda:
            yield from _unseen()
        return
    archs = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        properties: DeviceProperties = torch.cuda.get_device_properties(index)
        yield from properties_facts(f"cuda:{index}", properties, archs)


def _unseen() -> Iterator[DoctorFact]:
    from ..kernels.device.compute_capability import UnsupportedCapability
    from ..kernels.device.torch_builds import list_cards, wheel_hint

    for name, capability in list_cards():
        value = "{}, compute capability {}.{}, which a CPU build of torch does not use".format(name, *capability)
        try:
            yield DoctorFact("Devices", "gpu", value, "missing", wheel_hint(capability))
        except UnsupportedCapability as error:
            yield DoctorFact("Devices", "gpu", f"{name}: {error}", "note")


def properties_facts(name: str, properties: DeviceProperties, archs: Sequence[str]) -> Iterator[DoctorFact]:
    """Yield facts of a device as torch describes it; `archs`: what torch's build has machine code for."""
    from ..kernels.device.compute_capability import UnsupportedCapability
    from ..kernels.device.device_lookup import match_device

    try:
        found = match_device(properties)
    except UnsupportedCapability as error:
        yield DoctorFact("Devices", name, f"{properties.name}: {error}", "missing", "use another device")
        return
    device = found.device
    note = f"; {found.note}" if found.note else ""
    yield DoctorFact(
        f"{name}, {device.name}", "device",
        f"compute capability {properties.major}.{properties.minor}, {device.sms} SMs, {device.memory / GIB:.1f} GiB, "
        f"{device.bandwidth / 1e9:.0f} GB/s by the table{note}",
    )  # fmt: skip
    yield _torch_fit(f"{name}, {device.name}", (properties.major, properties.minor), archs)
    yield from device_facts(f"{name}, {device.name}", device)


def named_gpu_facts(name: str) -> list[DoctorFact]:
    """Return facts of a GPU that is not here: a name as torch has it ("Tesla P40"), or a capability ("6.1").

    Raises KeyError with the names there are.
    """
    from ..kernels.device.compute_capability import CAPABILITIES
    from ..kernels.device.device_table import DEVICES

    for device in DEVICES:
        if name in device.names or name == str(device.capability):
            break
    else:
        capabilities = ", ".join("{}.{}".format(*each) for each in CAPABILITIES)
        raise KeyError(f"{name!r} is not in the table: expected one of {capabilities}, or a name such as Tesla P40")
    section = f"{device.name}, which is not here: from the table"
    figures = (
        f"compute capability {device.capability}, {device.sms} SMs, {device.memory / GIB:.0f} GiB, "
        f"{device.bandwidth / 1e9:.0f} GB/s"
    )
    builds = ", ".join(device.capability.torch_builds)
    return [
        DoctorFact(section, "device", figures),
        DoctorFact(section, "torch", f"has machine code for it in the builds {builds}"),
        *device_facts(section, device),
    ]


def device_facts(section: str, device: DeviceSpec) -> Iterator[DoctorFact]:
    """Yield the precision with reasons, and for each operator where its config comes from."""
    from ..kernels.device.precision import policy_of

    policy = policy_of(*device.capability.version)
    for choice in _CHOICES:
        why = policy.reasons.get(choice, "")
        yield DoctorFact(section, choice, _said(getattr(policy, choice)) + (f": {why}" if why else ""))
    yield _compiler(section, policy)
    yield from _operators(section, device, policy)


def _said(choice: ComputeUnit | str | bool | None) -> str:
    if choice is None:
        return "not used"
    if isinstance(choice, bool):
        return "yes" if choice else "no"
    return choice if isinstance(choice, str) else f"{choice.arithmetic} through {choice.through}"


def _operators(section: str, device: DeviceSpec, policy: PrecisionPolicy) -> Iterator[DoctorFact]:
    from ..kernels.launch.config_tables import choose_config
    from ..kernels.launch.kernel_operation import ProblemShape
    from ..kernels.launch.model_shapes import MODELS
    from ..kernels.registry import OPERATIONS, find_operation
    from ..kernels.tuning.operation_listing import operations_by_rows
    from ..kernels.w4a16 import int4_operations as int4
    from ..kernels.w8a8 import int8_product

    example = MODELS[1]
    n, k = example.linears["gate_up"]
    chosen: dict[str, Callable[[int], tuple[KernelOperation, str]]] = {
        "int4 layers": lambda m: int4.kernel_for(policy, ProblemShape.of(m=m, n=n, k=k, group=128), device)
    }
    if policy.int8:
        chosen["int8 layers"] = lambda m: int8_product.kernel_for(
            policy, ProblemShape.of(m=m, n=n, k=k, group=0, zeros="no"), device
        )
    else:
        yield DoctorFact(section, "int8 layers", f"written out in {policy.compute}: {policy.reasons['int8']}", "note")
    if policy.fp8:
        chosen["fp8 layers"] = lambda m: (find_operation("fp8"), policy.reasons["fp8"])
    else:
        yield DoctorFact(section, "fp8 layers", f"written out in {policy.compute}: {policy.reasons['fp8']}", "note")
    for layers, kernel_for in chosen.items():
        for first, last, name, why in operations_by_rows(kernel_for):
            tokens = f"{first} to {last}" if last > first else str(first)
            yield DoctorFact(section, layers, f"{tokens} tokens: {name}, {why} (gate and up of {example.name})")
    for each in OPERATIONS:
        if why := each.refusal(policy):
            yield DoctorFact(section, each.name, f"not used: {why}", "note")
            continue
        shape = each.samples(policy)[0]
        choice = choose_config(each, policy, shape, device)
        config = " ".join(f"{name}={value}" for name, value in choice.config.to_json().items())
        yield DoctorFact(section, each.name, f"{config} for {shape.key} ({choice.how})")


def _compiler(section: str, policy: PrecisionPolicy) -> DoctorFact:
    """Return whether Triton compiles for the device, which is tried on the smallest kernel."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return DoctorFact(section, "Triton", "not tried: TRITON_INTERPRET is set", "note")
    try:
        import triton

        from ..kernels.compiler.aot import compile_variant
        from ..kernels.registry import find_operation

        small = find_operation("w4a16_dequantize")
        shape = small.samples(policy)[0]
        [launch] = small.launches(policy, shape, small.configs(policy, shape)[0])
        compiled = compile_variant(launch.variant, policy.capability.version)
    except Exception as error:  # noqa: BLE001  whatever its compiler or ptxas says is what one wants to know
        return DoctorFact(
            section, "Triton", f"{type(error).__name__}: {str(error)[:200]}", "missing", pip_install_command("triton")
        )
    return DoctorFact(
        section, "Triton", f"{triton.__version__} compiles for it ({compiled.seconds:.1f} s for one kernel)"
    )


def _torch_fit(section: str, capability: tuple[int, int], archs: Sequence[str]) -> DoctorFact:
    """Return whether torch has machine code for the device; CUDA would fail later with "no kernel image is
    available".
    """
    from ..kernels.device.torch_builds import has_machine_code, wheel_hint

    built = ", ".join(archs)
    if has_machine_code(capability, archs):
        return DoctorFact(section, "torch", f"has machine code for it: {built}")
    value = f"has no machine code for it, only {built}: CUDA would find no kernel image"
    return DoctorFact(section, "torch", value, "missing", wheel_hint(capability))
