"""Lookup of a device: by the name that torch gives it, else by SMs and memory, else by its compute capability alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

from .compute_capability import capability_of
from .device_spec import DeviceSpec
from .device_table import DEVICES

_FROM_TORCH = "torch.cuda.get_device_properties"


@dataclass(frozen=True, slots=True)
class DeviceMatch:
    """Device that was found, and how it was found.

    by  "name"; "shape": by capability, SMs and memory; "capability": an estimate for an unknown device
    """

    device: DeviceSpec
    by: Literal["name", "shape", "capability"]
    note: str = ""


class DeviceProperties(Protocol):
    """Properties that are read from torch.cuda.get_device_properties."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int


def find_device(
    name: str, capability: tuple[int, int], sms: int | None = None, memory: int | None = None
) -> DeviceMatch:
    """Return the device that torch calls `name`, or the nearest known one.

    Of several devices with the same SMs and memory it is the one with the least bandwidth. If only the capability is
    known it has the least arithmetic and the least bandwidth per SM of the known devices of that capability. Raises
    UnsupportedCapability below 6.0.
    """
    chip, note = capability_of(*capability)
    tabled = [device for device in DEVICES if device.capability is chip]
    for device in tabled:
        if name in device.names and not note:
            return DeviceMatch(device, "name")
    alike = [device for device in tabled if sms == device.sms and memory and _matches_memory(memory, device.memory)]
    if alike and not note:
        slowest = min(alike, key=lambda device: device.bandwidth)
        return DeviceMatch(
            slowest, "shape", f"{name} is not in the table: as many SMs and as much memory as {slowest.name}"
        )
    said = note or f"{name} is not in the table"
    device, origin = _conservative_device(tabled, sms)
    device = replace(device, name=name, names=(), memory=memory or device.memory)
    return DeviceMatch(device, "capability", f"{said}; {origin}")


def match_device(properties: DeviceProperties) -> DeviceMatch:
    """Return the device that torch describes: SMs, memory and L2 as torch reports them, the rest from the table."""
    sms, memory = properties.multi_processor_count, properties.total_memory
    found = find_device(properties.name, (properties.major, properties.minor), sms, memory)
    device = found.device.scaled(sms)  # a partition of a card (MIG) has fewer SMs than the whole card
    l2 = getattr(properties, "L2_cache_size", None) or device.l2
    from_torch = dict.fromkeys(("sms", "memory", *(["l2"] if l2 != device.l2 else [])), _FROM_TORCH)
    device = replace(device, name=properties.name, memory=memory, l2=l2, sources={**device.sources, **from_torch})
    return replace(found, device=device)


def _matches_memory(memory: int, nominal: int) -> bool:
    """Return whether reported memory fits a nominal size: the driver and ECC take up to a tenth."""
    return 0.88 * nominal <= memory <= 1.02 * nominal


def _conservative_device(tabled: list[DeviceSpec], sms: int | None) -> tuple[DeviceSpec, str]:
    """Return an estimate for an unknown device: no faster per SM than any known device of the capability."""

    def arithmetic(device: DeviceSpec) -> float:
        return device.rates.get("tensor-fp16", device.rates["fp32"]) / device.sms

    slowest = min(tabled, key=arithmetic)
    narrow = min(tabled, key=lambda device: device.bandwidth / device.sms)
    count = sms or min(device.sms for device in tabled)
    bandwidth = narrow.bandwidth / narrow.sms * count
    origin = f"per SM the arithmetic of {slowest.name} and the bandwidth of {narrow.name}, for {count} SMs"
    device = slowest.scaled(count)
    return replace(device, bandwidth=bandwidth, sources={**device.sources, "bandwidth": f"computed: {origin}"}), origin
