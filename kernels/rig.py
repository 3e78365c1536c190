"""What kernels run on: the GPU at hand, or on a machine without one a stand-in that Triton's interpreter computes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .device_lookup import at_hand
from .device_table import DEVICES
from .devices import Device
from .precision import PrecisionPolicy, policy_of

__all__ = ["Rig", "gpu", "stand_in"]


@dataclass(frozen=True, slots=True)
class Rig:
    """device: where tensors live. policy: which kernels, and in what. about: the figures of the GPU."""

    device: torch.device
    policy: PrecisionPolicy
    about: Device

    @property
    def real(self) -> bool:
        """A stand-in computes the same kernels, and its times mean nothing."""
        return self.device.type == "cuda"

    @property
    def cache_bytes(self) -> int:
        """What inputs must be rotated past. A stand-in has nothing to rotate for."""
        return self.about.l2 or 0 if self.real else 0


def gpu(device: torch.device) -> Rig:
    """Makes it the current device: that is where Triton launches."""
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    return Rig(device, policy_of(properties.major, properties.minor), at_hand(properties).device)


def stand_in(capability: tuple[int, int]) -> Rig:
    """For TRITON_INTERPRET=1. In fp16 where the policy says bf16, which the interpreter computes wrongly."""
    policy = policy_of(*capability)
    if policy.storage == "bf16":
        policy = replace(policy, storage="fp16", compute="fp16")
    about = next(device for device in DEVICES if device.capability is policy.capability)
    return Rig(torch.device("cpu"), policy, about)
