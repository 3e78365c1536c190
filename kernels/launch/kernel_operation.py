"""An operator as the compiler, the tuner, the benchmark and the tests see it: one object, in its kernels' own file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..device.precision import PrecisionPolicy
from ..device.roofline import OperationWork
from .variant import Config, Variant

__all__ = [
    "SHORTEST_CONTEXT",
    "KernelLaunch",
    "KernelOperation",
    "KernelProblem",
    "ProblemShape",
    "main_launch_index",
    "pad_graph_rows",
    "round_up_power_of_two",
]

SHORTEST_CONTEXT = 256  # contexts below are as this one: a graph captured for it rounds no other way than a step alone
# What a step brings, and not a model: rows of a layer, tokens, rows of logits, sequences, and tokens of each.
_IGNORED_FIELDS = frozenset({"bias", "scales", "history", "sums", "ragged"})
_STEP_SIZES = frozenset({"m", "t", "r", "batch", "context", "new"})


def round_up_power_of_two(number: int, least: int = 1) -> int:
    """Up to a power of two, of which `least` is one."""
    return max(least, 1 << max(0, number - 1).bit_length())


def pad_graph_rows(rows: int) -> int:
    """The rows that a graph has for so many, if it has as many: 1, 2, 4, then every 8 up to 64, every 16 up to 128,
    every 32 beyond. Kernels compute as much for a few rows more.
    """
    if rows <= 4:
        return round_up_power_of_two(rows)
    step = 8 if rows <= 64 else 16 if rows <= 128 else 32
    return -(-rows // step) * step


@dataclass(frozen=True, slots=True)
class ProblemShape:
    """Problems that share a config: sizes by name, and words for what is no size."""

    fields: tuple[tuple[str, int | str], ...]

    @classmethod
    def of(cls, **fields: int | str) -> ProblemShape:
        return cls(tuple(sorted(fields.items())))

    @classmethod
    def parse(cls, key: str) -> ProblemShape:
        """What `key` gave."""
        pairs = (pair.split("=", 1) for pair in key.split())
        return cls.of(**{name: int(value) if value.isdigit() else value for name, value in pairs})

    @property
    def key(self) -> str:
        """Such as "group=128 k=4096 m=1 n=4096"."""
        return " ".join(f"{name}={value}" for name, value in self.fields)

    def __getitem__(self, name: str) -> Any:
        return dict(self.fields)[name]

    def get(self, name: str, default: Any) -> Any:
        return dict(self.fields).get(name, default)

    @property
    def plain(self) -> ProblemShape:
        """Without what no config depends on: bias "yes", the type of a weight's scales or of a history where it is
        another, the columns of each of the sums that zero points want, and whether sequences are ragged.
        """
        return ProblemShape(tuple(field for field in self.fields if field[0] not in _IGNORED_FIELDS))

    @property
    def rounded(self) -> ProblemShape:
        """As configs are looked up, by whoever asks: what changes with every step up to a power of two."""
        return ProblemShape(tuple((name, _lookup_size(name, value)) for name, value in self.fields))

    @property
    def padded(self) -> ProblemShape:
        """As a graph has it: whoever takes another kernel by the number of rows must take the same for both."""
        rows = {"m": pad_graph_rows(self["m"])}
        return ProblemShape(tuple((name, rows.get(name, value)) for name, value in self.fields))

    def distance(self, other: ProblemShape, exact: frozenset[str] = frozenset()) -> float:
        """Doublings between the two; infinite if words, or sizes named in `exact`, differ."""
        mine, others = dict(self.fields), dict(other.fields)
        if mine.keys() != others.keys():
            return math.inf
        total = 0.0
        for name, value in mine.items():
            against = others[name]
            if isinstance(value, str) or isinstance(against, str) or name in exact or not value or not against:
                total += 0.0 if value == against else math.inf
            else:
                total += abs(math.log2(value / against))
        return total

    def apart(self, other: ProblemShape, exact: frozenset[str] = frozenset()) -> float:
        """Doublings between sizes that both have, those named in `exact` aside."""
        others = dict(other.fields)
        pairs = [(value, others[name]) for name, value in self.fields if name in others and name not in exact]
        sizes = [(mine, theirs) for mine, theirs in pairs if isinstance(mine, int) and isinstance(theirs, int)]
        return sum(abs(math.log2(mine / theirs)) for mine, theirs in sizes if mine and theirs)


def _lookup_size(name: str, value: int | str) -> int | str:
    if name not in _STEP_SIZES or isinstance(value, str):
        return value
    return round_up_power_of_two(value, SHORTEST_CONTEXT if name == "context" else 1)


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One kernel of an operator.

    grid         blocks in each dimension
    instruction  what its inner product must have become, in PTX and by its full name, with "*" for any size, such as
                 "wgmma.mma_async.sync.aligned.m64n*k16.f32.bf16.bf16"; empty where there is no product
    moved        bytes that it reads or writes beyond the operator's own, such as partial sums
    share        of the instructions of the inner loop, so many at least must be `instruction`
    loops        that must each have it: the largest ones that have no loop in them
    least        how many of it each of these has: more than one of several products alone would be
    aside        it is not what the operator's config is chosen by, such as penalties before the sampler
    """

    variant: Variant
    grid: tuple[int, ...]
    instruction: str = ""
    moved: int = 0
    share: float = 0.0
    loops: int = 1
    least: int = 1
    aside: bool = False


def main_launch_index(launches: Sequence[KernelLaunch]) -> int:
    """Which of an operator's launches a config is chosen by."""
    return next(index for index, launch in enumerate(launches) if not launch.aside)


@dataclass(frozen=True, slots=True)
class KernelProblem:
    """Inputs of one shape, on a device, and all that can be asked of them.

    run    the operator, with that config
    error  the worst difference of what `run` gave to the reference in fp64, over what rounding explains: at most 1
    work   for the roofline: as the operator's
    peers  name -> the same by other means, such as torch.matmul; each may raise where it cannot run. Once it has run,
           the host must wait for nothing in it: it is measured in a CUDA graph, and a failed capture ends a process
    """

    run: Callable[[Config], Any]
    error: Callable[[Any], float]
    work: OperationWork
    peers: Mapping[str, Callable[[], object]] = field(default_factory=dict)


class KernelOperation(Protocol):
    """Kernels under one name, by which their configs are kept in `tuned/`.

    exact  sizes that must be equal before a config found for one shape is used for another
    """

    @property
    def name(self) -> str: ...

    @property
    def exact(self) -> frozenset[str]: ...

    def refusal(self, policy: PrecisionPolicy) -> str:
        """Why this capability does not use it; empty if it does."""
        ...

    def shapes(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        """Those that are tuned and measured."""
        ...

    def samples(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        """A few that between them have every kernel and every branch that a model can reach there.

        All of them are compiled for each capability, and checked on a GPU. What is seldom launched is there once, on
        a shape that leaves the kernel the fewest registers.
        """
        ...

    def small(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        """Some that Triton's interpreter computes within a second or two: for a rehearsal without a GPU."""
        ...

    def configs(self, policy: PrecisionPolicy, shape: ProblemShape) -> tuple[Config, ...]:
        """What a tuner may try; the first is right everywhere and taken where nothing is known."""
        ...

    def launches(self, policy: PrecisionPolicy, shape: ProblemShape, config: Config) -> tuple[KernelLaunch, ...]:
        """What `run` launches, in order."""
        ...

    def work(self, policy: PrecisionPolicy, shape: ProblemShape) -> OperationWork:
        """For the roofline."""
        ...

    def problem(
        self, policy: PrecisionPolicy, shape: ProblemShape, device: torch.device, seed: int = 0
    ) -> KernelProblem:
        """Random inputs as models have them. Not for fp64: references make their own."""
        ...
