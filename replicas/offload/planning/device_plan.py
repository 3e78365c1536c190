"""Plan of where each layer of a GPU's model is, made from sizes alone: on the device, pinned on the host, or on disk.

Head, norms and the embedding stay on the device (only the device may know which tokens a step has), as do two buffers:
one for the layer that computes, one for the next. As few layers as possible are offloaded, and of these as few as
possible to disk: they are read into two buffers on the host, pinned like all that is copied from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...errors import InvalidRequest
from ...execution.swapper import pinned_bytes, round_up_to_power_of_two
from .disk_plan import (
    PAGE_BYTES,
    STEPS,
    WeightSizes,
    format_mib,
    round_to_pages,
    spread_evenly,
    weights_memory_error,
)

WeightLocation = Literal["device", "host", "disk"]

HOST_PARAM = "weights_host_memory_bytes"
_ALIGNMENT_SLACK = 512  # alignment of layers in a buffer of the device, in bytes: more than any kernel needs


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Offload plan of a GPU: where each layer's weights are.

    where  for each layer where its linears are: "device", "host" or "disk"
    """

    sizes: WeightSizes
    where: tuple[WeightLocation, ...]

    def __post_init__(self) -> None:
        assert len(self.where) == len(self.sizes.layers)

    @classmethod
    def all_on(cls, place: WeightLocation, sizes: WeightSizes) -> DevicePlan:
        return cls(sizes, (place,) * len(sizes.layers))

    def on(self, place: WeightLocation) -> tuple[int, ...]:
        """Return the numbers of the layers whose weights are in that place: device, host or disk."""
        return tuple(index for index, there in enumerate(self.where) if there == place)

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers that are offloaded, to the host or to disk."""
        return tuple(index for index, there in enumerate(self.where) if there != "device")

    @property
    def buffer_bytes(self) -> int:
        """Bytes of each of the device's two buffers that offloaded layers are copied to."""
        return max(
            (-(-self.sizes.layers[index] // _ALIGNMENT_SLACK) * _ALIGNMENT_SLACK for index in self.layers), default=0
        )

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's memory for the weights that stay there and for the two buffers."""
        return self.sizes.nbytes - self.copied_bytes + 2 * self.buffer_bytes

    @property
    def copied_bytes(self) -> int:
        """Bytes of offloaded layers that every step copies to the device."""
        return self._bytes(self.layers)

    @property
    def read_bytes(self) -> int:
        """Bytes of layers that every step reads from disk."""
        return self._bytes(self.on("disk"))

    @property
    def staging_bytes(self) -> int:
        """Bytes of each of the two buffers on the host; they begin at a page, which loses at most one page."""
        return max((round_to_pages(self.sizes.layers[index]) + PAGE_BYTES for index in self.on("disk")), default=0)

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned memory: layers on the host, and the buffers that layers on disk are read into."""
        return pinned_bytes(self._bytes(self.on("host")), 1) + 2 * round_up_to_power_of_two(self.staging_bytes)

    def __str__(self) -> str:
        if not self.layers:
            return f"all on the device, {format_mib(self.sizes.nbytes)}"
        parts = [
            f"{len(layers)} {how} ({', '.join(map(str, layers))})"
            for how, layers in (("pinned on the host", self.on("host")), ("on disk", self.on("disk")))
            if layers
        ]
        read = f", {format_mib(self.read_bytes)} of it from disk" if self.read_bytes else ""
        return (
            f"of {len(self.where)} layers {' and '.join(parts)}, {format_mib(self.copied_bytes)} copied a step{read}; "
            f"{format_mib(self.device_bytes)} of {format_mib(self.sizes.nbytes)} on the device, "
            "the embedding with them, and "
            f"{format_mib(self.host_bytes)} of the host's memory"
        )

    @property
    def json_fields(self) -> dict[str, object]:
        """The offload plan as a dictionary for JSON."""
        return {
            "layers": list(self.layers),
            "on_host": list(self.on("host")),
            "on_disk": list(self.on("disk")),
            "embedding": False,
            "memory_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "copied_bytes": self.copied_bytes,
            "read_bytes": self.read_bytes,
        }

    def _bytes(self, layers: Sequence[int]) -> int:
        return sum(self.sizes.layers[index] for index in layers)


def plan_device(sizes: WeightSizes, budget: int, host: int) -> DevicePlan:
    """Return the plan with as few layers off the device as its budget allows, spread evenly, and as few of these on
    disk as the host's budget allows.

    Raises InvalidRequest naming the budget that is too small, and what would suffice.
    """
    count = len(sizes.layers)
    if sizes.nbytes <= budget:
        stays: list[WeightLocation] = ["device"] * count
        return DevicePlan(sizes, tuple(stays))
    for gone in range(1, count + 1):
        away = spread_evenly(gone, count)
        where: list[WeightLocation] = ["host" if each else "device" for each in away]
        found = DevicePlan(sizes, tuple(where))
        if found.device_bytes <= budget:
            return _move_to_disk(found, host)
    raise weights_memory_error(
        f"{format_mib(budget)} is too little: embedding, head and norms take "
        f"{format_mib(sizes.embedding + sizes.fixed)}, two buffers of a layer {format_mib(2 * found.buffer_bytes)}; "
        f"expected at least {found.device_bytes} bytes"
    )


def _move_to_disk(found: DevicePlan, host: int) -> DevicePlan:
    """Return the plan with as few of its offloaded layers on disk as the host's budget allows. Raises
    InvalidRequest.
    """
    if found.host_bytes <= host:
        return found
    layers = found.layers
    smallest = found
    for some in range(1, len(layers) + 1):
        chosen = {layer for layer, there in zip(layers, spread_evenly(some, len(layers)), strict=True) if there}
        where: list[WeightLocation] = ["disk" if index in chosen else there for index, there in enumerate(found.where)]
        tried = DevicePlan(found.sizes, tuple(where))
        if tried.host_bytes <= host:
            return tried
        smallest = min(smallest, tried, key=lambda each: each.host_bytes)
    raise host_memory_error(
        f"{format_mib(host)} is too little for the {len(layers)} layers that the device has no room for; expected at "
        f"least {smallest.host_bytes} bytes, with {len(smallest.on('disk'))} of them on disk, or {found.host_bytes} "
        "for all"
    )


def offloaded_step_s(
    plan: DevicePlan, copies_per_s: float, reads_per_s: float, layers_s: Sequence[float], rest_s: float
) -> float:
    """Seconds of a step in a series of equal steps: those of disk, link or computing, whichever is slowest, and what
    does not overlap.

    layers_s  seconds that each layer computes
    rest_s    seconds for embedding, head and what else a step does once

    A layer is copied as soon as one of the device's buffers is free, one copy after the other. A layer on disk is
    copied once it has been read, which begins as soon as one of the host's buffers is free.
    """
    now = copied = read = 0.0
    free, staged, began, visit, turn = [0.0, 0.0], [0.0, 0.0], 0.0, 0, 0
    for _ in range(STEPS):
        began = now
        for nbytes, there, seconds in zip(plan.sizes.layers, plan.where, layers_s, strict=True):
            if there == "disk":
                read = max(read, staged[turn % 2]) + nbytes / reads_per_s
            if there != "device":
                copied = max(copied, free[visit % 2], read if there == "disk" else 0.0) + nbytes / copies_per_s
                now = max(now, copied)
            now += seconds
            if there == "disk":
                staged[turn % 2] = copied
                turn += 1
            if there != "device":
                free[visit % 2] = now
                visit += 1
        now += rest_s
    return now - began


def host_memory_error(why: str) -> InvalidRequest:
    """Return an InvalidRequest that names the option for weights in the host's memory."""
    return InvalidRequest(f"{HOST_PARAM}: {why}", param=HOST_PARAM)
