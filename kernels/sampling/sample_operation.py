"""Sampling operator for the compiler, the tuner, the benchmark and the tests; the kernels are in sample_kernels.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..device.precision import PrecisionPolicy
from ..device.roofline import ElementwiseWork, OperationWork
from ..launch.kernel_operation import KernelLaunch, KernelProblem, ProblemShape
from ..launch.model_shapes import MODELS
from ..launch.variant import Config
from ..pointwise.pointwise_operation import PointwiseOperation, shape_sizes, worst_ratio
from .sample import (
    PenaltyRows,
    SamplingRows,
    VocabularySplit,
    penalize_logits,
    penalty_variant,
    sample,
    sample_variants,
)
from .sample_reference import choose_tokens, logprob

_ROWS = (1, 8, 64)
_FILTERS = {"none": (False, False), "all": (True, True)}  # (top_k, top_p); "all" also applies penalties


def random_rows(num_rows: int, device: torch.device, seed: int, *, filtered: bool = True) -> SamplingRows:
    """Return random sampling parameters for each row: one in four rows is greedy, and about two in three have each
    filter.
    """
    source = torch.Generator().manual_seed(seed)

    def one_of(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        picked = torch.tensor(values)[torch.randint(len(values), (num_rows,), generator=source)]
        return picked.to(device, dtype)

    numbers = torch.randint(-(2**62), 2**62, (num_rows,), generator=source).to(device)
    return SamplingRows(
        temperature=one_of([0.0, 0.3, 0.8, 1.5], torch.float32),
        top_k=one_of([0, 1, 40, 1000] if filtered else [0], torch.int32),
        top_p=one_of([1.0, 0.9, 0.99, 0.3] if filtered else [1.0], torch.float32),
        min_p=one_of([0.0, 0.0, 0.05], torch.float32),
        seed=numbers,
        choice=one_of([0, 1], torch.int32),
        position=torch.arange(num_rows, device=device),
    )


def no_penalties(num_rows: int, device: torch.device) -> PenaltyRows:
    """Return penalties that leave logits unchanged but are computed like any others."""
    none = torch.zeros(num_rows, device=device)
    return PenaltyRows(torch.arange(num_rows, device=device), torch.ones_like(none), none, none)


def logprob_error(logits: torch.Tensor, tokens: torch.Tensor, found: torch.Tensor) -> float:
    """Return the largest ratio of the error of log-probabilities to its bound, compared with fp64.

    In units of 2**-23: the logarithm and the two differences round by their own magnitudes; a term exp(-d) by 2 units
    of ex2.approx and d of its rounded product, of which at most exp(-d), and d exp(-d) < 1, reach the sum; and a term
    goes through at most 64 additions, 16 in its lane of a tile, the others between lanes and chunks.
    """
    spread = logits.double().amax(-1) - logits.double().gather(1, tokens[:, None]).squeeze(1)
    expected = logprob(logits, tokens)
    return worst_ratio(found, expected, 2.0**-23 * (72 + 2 * spread.abs() + expected.abs()))


def sample_by_torch(logits: torch.Tensor) -> torch.Tensor:
    """Return ids [R] sampled in the way torch.multinomial samples one.

    torch.multinomial itself cannot be captured in a CUDA graph, since it checks its input on the host.
    """
    weights = torch.softmax(logits, -1)
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1)


@dataclass(frozen=True, slots=True)
class SampleOperation(PointwiseOperation):
    """Sampling operator. Fields of a shape: r rows of v logits, `filters`, and `history`.

    `history` is the dtype of the penalties' history if it is "int32", as contexts above 32,768 tokens need it.
    """

    name: str = "sample"

    def shapes(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        vocabularies = dict.fromkeys(model.vocabulary for model in MODELS)
        return tuple(
            ProblemShape.of(filters=filters, r=rows, v=size)
            for size in vocabularies
            for filters in _FILTERS
            for rows in _ROWS
        )

    def samples(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        """Sample shapes; with a long context's history they cover every config of the penalties, for any number of
        rows.
        """
        long = (ProblemShape.of(filters="all", history="int32", r=rows, v=152_064) for rows in _ROWS)
        return (*(ProblemShape.of(filters=filters, r=1, v=152_064) for filters in _FILTERS), *long)

    def small(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return tuple(ProblemShape.of(filters=filters, r=3, v=3000) for filters in _FILTERS)

    def configs(self, policy: PrecisionPolicy, shape: ProblemShape) -> tuple[Config, ...]:
        kibi = [(8, 2, 16), (4, 1, 4), (8, 1, 4), (8, 2, 8), (16, 4, 8), (32, 2, 16)]
        return tuple(Config.of(warps, CHUNK=1024 * chunk, TILE=1024 * tile) for chunk, tile, warps in kibi)

    def launches(self, policy: PrecisionPolicy, shape: ProblemShape, config: Config) -> tuple[KernelLaunch, ...]:
        rows, size = shape_sizes(shape, "r", "v")
        top_k, top_p = _FILTERS[shape["filters"]]
        *chunked, draw = sample_variants(size, config, top_k=top_k, top_p=top_p)
        grid, again = (rows, VocabularySplit.of(size, config).chunks), 4 * rows * size
        launches = (*(KernelLaunch(variant, grid, moved=again) for variant in chunked), KernelLaunch(draw, (rows,)))
        if not (top_k and top_p):
            return launches
        return (KernelLaunch(penalty_variant(size, config, _history(shape)), grid, moved=again, aside=True), *launches)

    def work(self, policy: PrecisionPolicy, shape: ProblemShape) -> OperationWork:
        """Return the bytes and operations that the roofline counts for sampling: logits are read once.

        The kernels themselves read the logits once per launch, and `survey` reads them twice.
        """
        elements = int(shape["r"]) * int(shape["v"])
        return ElementwiseWork(4 * elements, 40 * elements)

    def problem(
        self, policy: PrecisionPolicy, shape: ProblemShape, device: torch.device, seed: int = 0
    ) -> KernelProblem:
        count, size = shape_sizes(shape, "r", "v")
        top_k, top_p = _FILTERS[shape["filters"]]
        source = torch.Generator(device).manual_seed(seed)
        logits = 3 * torch.randn(count, size, generator=source, device=device)
        rows = random_rows(count, device, seed, filtered=top_k)
        penalties = no_penalties(count, device)
        history = torch.zeros(count, size, dtype=_history(shape), device=device)

        def run(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
            adjusted = penalize_logits(logits, history, penalties, config) if top_k and top_p else logits
            return sample(adjusted, rows, config, top_k=top_k, top_p=top_p)

        def error(found: tuple[torch.Tensor, torch.Tensor]) -> float:
            if found[0].tolist() != choose_tokens(logits, rows):
                return float("inf")
            return logprob_error(logits, *found)

        return KernelProblem(
            run,
            error,
            self.work(policy, shape),
            {"torch": lambda: sample_by_torch(logits)},
        )


def _history(shape: ProblemShape) -> torch.dtype:
    return torch.int32 if shape.get("history", "") == "int32" else torch.int16


SAMPLE = SampleOperation()
OPERATIONS = (SAMPLE,)
