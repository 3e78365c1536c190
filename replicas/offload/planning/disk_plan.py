"""Plan of which weights stay in memory on a CPU, and which are read from disk in every step, made from their sizes
alone.

Rows of the embedding go first: a step reads only those of its tokens, a few KiB. Then layers go, as few as will do,
since every layer on disk makes steps longer. Head and norms stay, as do two buffers: one for the layer that computes,
one for the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import InvalidRequest

PAGE_BYTES = 4096
DEVICE_PARAM = "weights_memory_bytes"
STEPS = 4  # simulated steps until they all take equally long


class WeightBudgets(NamedTuple):
    """Bytes that weights may take.

    device  bytes of the device's memory
    host    bytes of the host's memory, where the device has memory of its own; None where it has not
    """

    device: int
    host: int | None


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Bytes of weights in the form that kernels use.

    fixed   bytes of head and norms
    layers  bytes of the linears of each layer
    """

    embedding: int
    fixed: int
    layers: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.embedding + self.fixed + sum(self.layers)


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """Offload plan of a CPU.

    on_disk    whether each layer is on disk
    embedding  whether the embedding is on disk
    """

    sizes: WeightSizes
    on_disk: tuple[bool, ...]
    embedding: bool

    def __post_init__(self) -> None:
        assert len(self.on_disk) == len(self.sizes.layers)

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers whose weights are on disk."""
        return tuple(index for index, there in enumerate(self.on_disk) if there)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of each of the two buffers that layers are read from disk into."""
        return max((round_to_pages(self.sizes.layers[index]) for index in self.layers), default=0)

    @property
    def read_bytes(self) -> int:
        """Bytes of layers that every step reads from disk."""
        return sum(self.sizes.layers[index] for index in self.layers)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory for the weights that stay there and for the two buffers."""
        resident = self.sizes.nbytes - self.read_bytes - self.embedding * self.sizes.embedding
        return resident + 2 * self.buffer_bytes

    @property
    def json_fields(self) -> dict[str, object]:
        """The offload plan as a dictionary for JSON."""
        return {
            "layers": list(self.layers),
            "embedding": self.embedding,
            "memory_bytes": self.memory_bytes,
            "read_bytes": self.read_bytes,
        }

    def __str__(self) -> str:
        what = [f"{len(self.layers)} of {len(self.on_disk)} layers"] if self.layers else []
        what += ["the embedding's rows"] * self.embedding
        if not what:
            return f"all in memory, {format_mib(self.sizes.nbytes)}"
        read = f", {format_mib(self.read_bytes)} a step" if self.layers else ""
        return (
            f"{' and '.join(what)} on disk{read}; "
            f"{format_mib(self.memory_bytes)} of {format_mib(self.sizes.nbytes)} in memory"
        )


@dataclass(frozen=True, slots=True)
class DecodeEstimate:
    """Expected speed of one sequence with a short context.

    bytes_per_s   bytes a second that the disk reads, measured past the page cache; None if nothing is read
    layers_s      seconds that each layer computes, without reading and copying
    rest_s        seconds of what else a step does once
    step_s        seconds of a step
    copies_per_s  bytes a second that are copied from the host to a GPU; None if nothing is
    """

    bytes_per_s: float | None
    layers_s: tuple[float, ...]
    rest_s: float
    step_s: float
    copies_per_s: float | None = None

    @property
    def compute_s(self) -> float:
        return sum(self.layers_s) + self.rest_s

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.step_s

    def __str__(self) -> str:
        rate = f"{self.tokens_per_s:.3g} tokens/s expected of one sequence"
        beside = [
            f"{what} at {per_s / 1e9:.2f} GB/s"
            for what, per_s in (("copying", self.copies_per_s), ("reading", self.bytes_per_s))
            if per_s is not None
        ]
        if not beside:
            return rate
        return f"{rate}: {self.compute_s * 1e3:.3g} ms of computing, beside {' and '.join(beside)}"


def plan_disk(sizes: WeightSizes, budget: int) -> DiskPlan:
    """Return the plan with as few layers on disk as the budget allows, spread evenly, so that each is read while others
    compute.

    Raises InvalidRequest where head, norms and two buffers exceed the budget.
    """
    count = len(sizes.layers)
    if sizes.nbytes <= budget:
        return DiskPlan(sizes, (False,) * count, embedding=False)
    for gone in range(count + 1):
        found = DiskPlan(sizes, spread_evenly(gone, count), embedding=True)
        if found.memory_bytes <= budget:
            return found
    raise weights_memory_error(
        f"{format_mib(budget)} is too little: head and norms take {format_mib(sizes.fixed)}, two buffers of a layer "
        f"{format_mib(2 * found.buffer_bytes)}; expected at least {found.memory_bytes} bytes"
    )


def disk_step_s(tiers: DiskPlan, bytes_per_s: float, layers_s: Sequence[float], rest_s: float) -> float:
    """Seconds of a step in a series of equal steps: those of reading or computing, whichever is slower, and what does
    not overlap.

    layers_s  seconds that each layer computes
    rest_s    seconds for embedding, head and what else a step does once

    A layer is read as soon as one of the two buffers is free, in the order of the layers and on into the next step.
    """
    now = read_until = 0.0
    free, began, visit = [0.0, 0.0], 0.0, 0
    for _ in range(STEPS):
        began = now
        for nbytes, there, seconds in zip(tiers.sizes.layers, tiers.on_disk, layers_s, strict=True):
            if there:
                read_until = max(read_until, free[visit % 2]) + nbytes / bytes_per_s
                now = max(now, read_until)
            now += seconds
            if there:
                free[visit % 2] = now
                visit += 1
        now += rest_s
    return now - began


def weights_memory_error(why: str) -> InvalidRequest:
    """Return an InvalidRequest that names the option for weights in memory."""
    return InvalidRequest(f"{DEVICE_PARAM}: {why}", param=DEVICE_PARAM)


def round_to_pages(nbytes: int) -> int:
    """Bytes of a buffer of whole pages for `nbytes` bytes of a file, which may begin and end within a page."""
    return (-(-nbytes // PAGE_BYTES) + 1) * PAGE_BYTES


def spread_evenly(some: int, count: int) -> tuple[bool, ...]:
    """Choose `some` of `count` items as evenly spread as possible; returns whether each is chosen."""
    chosen = {(2 * each + 1) * count // (2 * some) for each in range(some)}
    return tuple(index in chosen for index in range(count))


def format_mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
