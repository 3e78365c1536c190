"""Protocol of an operator for the compiler, the tuner, the benchmark and the tests.

Each operator is one object, in the file of its kernels or beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..device.precision import PrecisionPolicy
from ..device.roofline import OperationWork
from .variant import Config, Variant

# Shorter contexts use the config of this one, so that a CUDA graph captured for it rounds like a step without a graph.
SHORTEST_CONTEXT = 256
# Fields of a shape on which no config depends.
_IGNORED_FIELDS = frozenset({"bias", "scales", "history", "sums", "ragged"})
# Sizes that depend on the step and not on the model: rows of a layer, tokens, rows of logits, sequences, and tokens of
# each sequence.
_STEP_SIZES = frozenset({"m", "t", "r", "batch", "context", "new"})


def round_up_power_of_two(number: int, floor: int = 1) -> int:
    """Round up to a power of two; `floor` is a power of two and the smallest result."""
    return max(floor, 1 << max(0, number - 1).bit_length())


def pad_graph_rows(rows: int) -> int:
    """Return the rows of the CUDA graph that serves so many rows: 1, 2, 4, then every 8 up to 64, 16 up to 128, else
    32.

    Kernels take as long for the few additional rows.
    """
    if rows <= 4:
        return round_up_power_of_two(rows)
    step = 8 if rows <= 64 else 16 if rows <= 128 else 32
    return -(-rows // step) * step


@dataclass(frozen=True, slots=True)
class ProblemShape:
    """Shape of an operator's problem, by which configs are looked up: sizes by name, and strings for other
    properties.
    """

    fields: tuple[tuple[str, int | str], ...]

    @classmethod
    def of(cls, **fields: int | str) -> ProblemShape:
        return cls(tuple(sorted(fields.items())))

    @classmethod
    def parse(cls, key: str) -> ProblemShape:
        """Return the shape that a text such as "group=128 k=4096 m=1 n=4096" stands for, the inverse of `key`."""
        pairs = (pair.split("=", 1) for pair in key.split())
        return cls.of(**{name: int(value) if value.isdigit() else value for name, value in pairs})

    @property
    def key(self) -> str:
        """Text form of the shape, such as "group=128 k=4096 m=1 n=4096"."""
        return " ".join(f"{name}={value}" for name, value in self.fields)

    def __getitem__(self, name: str) -> Any:
        return dict(self.fields)[name]

    def get(self, name: str, default: Any) -> Any:
        return dict(self.fields).get(name, default)

    @property
    def plain(self) -> ProblemShape:
        """Shape without the fields on which no config depends.

        These are: whether there is a bias, the dtype of a weight's scales or of a history where it is unusual, the
        columns of each sum of codes for zero points, and whether sequences are ragged.
        """
        return ProblemShape(tuple(field for field in self.fields if field[0] not in _IGNORED_FIELDS))

    @property
    def rounded(self) -> ProblemShape:
        """Shape as configs are looked up for it everywhere: sizes that change with every step are rounded up to powers
        of two.
        """
        return ProblemShape(tuple((name, _lookup_size(name, value)) for name, value in self.fields))

    @property
    def padded(self) -> ProblemShape:
        """Shape with rows as a CUDA graph pads them.

        A choice of kernel by the number of rows must be the same for a graph as for a step without one.
        """
        rows = {"m": pad_graph_rows(self["m"])}
        return ProblemShape(tuple((name, rows.get(name, value)) for name, value in self.fields))

    def distance(self, other: ProblemShape, exact: frozenset[str] = frozenset()) -> float:
        """Number of doublings between two shapes; infinite if strings, or sizes named in `exact`, differ."""
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
        """Number of doublings between the sizes that both shapes have, except those named in `exact`."""
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
    """Launch of one kernel of an operator.

    grid         blocks in each dimension
    instruction  PTX instruction that the inner product must be compiled to, by its full name, with "*" for any size,
                 such as "wgmma.mma_async.sync.aligned.m64n*k16.f32.bf16.bf16"; empty where there is no product
    moved        bytes that it reads or writes beyond the operator's own, such as partial sums
    share        smallest fraction of the inner loop's instructions that must be `instruction`
    loops        number of loops that must each contain the instruction: the largest ones without a loop in them
    min_count    smallest count of the instruction in each of these loops, larger than one of several products alone
                 needs
    aside        whether the operator's config is not chosen by this kernel, such as penalties before the sampler
    """

    variant: Variant
    grid: tuple[int, ...]
    instruction: str = ""
    moved: int = 0
    share: float = 0.0
    loops: int = 1
    min_count: int = 1
    aside: bool = False


def main_launch_index(launches: Sequence[KernelLaunch]) -> int:
    """Index of the launch by which an operator's config is chosen."""
    return next(index for index, launch in enumerate(launches) if not launch.aside)


@dataclass(frozen=True, slots=True)
class KernelProblem:
    """Inputs of one shape on a device, with functions to run, check and compare the operator on them.

    run    runs the operator with a config
    error  largest ratio of the error of a result of `run`, compared with fp64, to the error that rounding explains: at
           most 1
    work   work for the roofline, the same as the operator's
    peers  name -> a function that computes the same by other means, such as torch.matmul; it may raise where it cannot
           run. After its first run it must not make the host wait: it is measured in a CUDA graph, and a failed capture
           ends the process
    """

    run: Callable[[Config], Any]
    error: Callable[[Any], float]
    work: OperationWork
    peers: Mapping[str, Callable[[], object]] = field(default_factory=dict)


class KernelOperation(Protocol):
    """Operator whose kernels share a name, under which their configs are kept in `tuned/`.

    exact  sizes that must be equal for a config of one shape to be used for another
    """

    @property
    def name(self) -> str: ...

    @property
    def exact(self) -> frozenset[str]: ...

    def refusal(self, policy: PrecisionPolicy) -> str:
        """Return why a capability does not use the operator; empty if it does."""
        ...

    def shapes(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        """Return the problem shapes for which the operator is tuned and measured on a capability."""
        ...

    def samples(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        """Return a few shapes that together cover every kernel and every branch that a model can reach.

        All of them are compiled for each capability, and checked on a GPU. A rarely launched kernel appears once, with
        a shape that leaves it the fewest registers.
        """
        ...

    def small(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        """Return shapes that Triton's interpreter computes within a second or two, for a rehearsal without a GPU."""
        ...

    def configs(self, policy: PrecisionPolicy, shape: ProblemShape) -> tuple[Config, ...]:
        """Return the configs that a tuner may try; the first works everywhere and is the default without a table."""
        ...

    def launches(self, policy: PrecisionPolicy, shape: ProblemShape, config: Config) -> tuple[KernelLaunch, ...]:
        """Return the launches of kernels, in order, by which the operator computes a shape with a config."""
        ...

    def work(self, policy: PrecisionPolicy, shape: ProblemShape) -> OperationWork:
        """Return the bytes and operations of a shape, from which the roofline predicts its least time."""
        ...

    def problem(
        self, policy: PrecisionPolicy, shape: ProblemShape, device: torch.device, seed: int = 0
    ) -> KernelProblem:
        """Return a problem with random inputs like a model's, in the policy's dtypes; references make their own in
        fp64.
        """
        ...
