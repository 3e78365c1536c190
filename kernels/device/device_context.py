"""Device context of kernels: a GPU, or, on a machine without one, a simulated GPU on Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .device_lookup import match_device
from .device_spec import DeviceSpec
from .device_table import DEVICES
from .precision import PrecisionPolicy, policy_of
from .torch_builds import has_machine_code, wheel_hint


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """Device context that kernels run in.

    device  device of the tensors
    policy  precision policy, which selects kernels and dtypes
    about   figures of the GPU
    """

    device: torch.device
    policy: PrecisionPolicy
    about: DeviceSpec

    @property
    def real(self) -> bool:
        """Whether this is a GPU; the interpreter computes the same kernels, but its times mean nothing."""
        return self.device.type == "cuda"

    @property
    def cache_bytes(self) -> int:
        """Bytes of cache that benchmark inputs must exceed when rotated; 0 for the interpreter."""
        return self.about.l2 or 0 if self.real else 0


def gpu_context(device: torch.device) -> DeviceContext:
    """Return the context of a GPU and make it the current device, since Triton launches on the current device.

    Raises ValueError for a GPU for which this torch has no machine code; CUDA would fail only when weights are loaded.
    """
    properties = torch.cuda.get_device_properties(device)
    capability, archs = (properties.major, properties.minor), torch.cuda.get_arch_list()
    policy = policy_of(*capability)
    if not has_machine_code(capability, archs):
        about = f"{properties.name} has compute capability {policy.capability}"
        only = f"this torch has no machine code for it, only {', '.join(archs)}"
        raise ValueError(f"device: {device}: {about}, and {only}; {wheel_hint(capability)}")
    torch.cuda.set_device(device)
    return DeviceContext(device, policy, match_device(properties).device)


def interpreter_context(capability: tuple[int, int]) -> DeviceContext:
    """Return the context of a simulated GPU, for TRITON_INTERPRET=1.

    It uses fp16 where the policy says bf16, which the interpreter computes wrongly.
    """
    policy = policy_of(*capability)
    if policy.storage == "bf16":
        policy = replace(policy, storage="fp16", compute="fp16")
    about = next(device for device in DEVICES if device.capability is policy.capability)
    return DeviceContext(torch.device("cpu"), policy, about)
