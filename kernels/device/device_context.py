"""What kernels run on: the GPU at hand, or on a machine without one a stand-in that Triton's interpreter computes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .device_lookup import match_device
from .device_spec import DeviceSpec
from .device_table import DEVICES
from .precision import PrecisionPolicy, policy_of
from .torch_builds import has_machine_code, wheel_hint

__all__ = ["DeviceContext", "gpu_context", "interpreter_context"]


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """device: where tensors live. policy: which kernels, and in what. about: the figures of the GPU."""

    device: torch.device
    policy: PrecisionPolicy
    about: DeviceSpec

    @property
    def real(self) -> bool:
        """A stand-in computes the same kernels, and its times mean nothing."""
        return self.device.type == "cuda"

    @property
    def cache_bytes(self) -> int:
        """What inputs must be rotated past. A stand-in has nothing to rotate for."""
        return self.about.l2 or 0 if self.real else 0


def gpu_context(device: torch.device) -> DeviceContext:
    """Makes it the current device: that is where Triton launches.

    Raises ValueError for one that this torch has no machine code for: CUDA would say so when weights are loaded.
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
    """For TRITON_INTERPRET=1. In fp16 where the policy says bf16, which the interpreter computes wrongly."""
    policy = policy_of(*capability)
    if policy.storage == "bf16":
        policy = replace(policy, storage="fp16", compute="fp16")
    about = next(device for device in DEVICES if device.capability is policy.capability)
    return DeviceContext(torch.device("cpu"), policy, about)
