"""Configs found by trying them: each must give the right answer before its time counts. On the GPU at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from .device_lookup import at_hand
from .measure import copies, time_of
from .operation import Operation, Problem, Shape
from .precision import PrecisionPolicy
from .tuning import Entry
from .variant import Config

__all__ = ["Trial", "search"]


@dataclass(frozen=True, slots=True)
class Trial:
    """One config: seconds, or why it does not count."""

    config: Config
    seconds: float | None
    why: str = ""


def search(
    operation: Operation,
    policy: PrecisionPolicy,
    shape: Shape,
    device: torch.device,
    bandwidth: float,
    tried: Callable[[Trial], None] = lambda trial: None,
) -> Entry | None:
    """The fastest right config, with its microseconds and share of `bandwidth` (bytes/s). None if none is right."""
    work = operation.work(policy, shape)
    cache = at_hand(torch.cuda.get_device_properties(device)).device.l2 or 0
    problems = [operation.problem(policy, shape, device, seed) for seed in range(copies(int(work.bytes), cache, 16))]
    best: Trial | None = None
    for config in operation.configs(policy, shape):
        trial = _try(config, problems, device)
        tried(trial)
        if trial.seconds is not None and (best is None or best.seconds is None or trial.seconds < best.seconds):
            best = trial
    if best is None or best.seconds is None:
        return None
    share = work.bytes / best.seconds / bandwidth
    facts = {"microseconds": round(best.seconds * 1e6, 2), "of_copy_bandwidth": round(share, 3)}
    return Entry(best.config, facts)


def _try(config: Config, problems: list[Problem], device: torch.device) -> Trial:
    try:
        worst = problems[0].error(problems[0].run(config))
        if not worst <= 1.0:  # NaN is wrong as well
            return Trial(config, None, f"wrong: off by {worst:.3g} times what rounding explains")
        timing = time_of([partial(problem.run, config) for problem in problems], device, budget_s=0.05)
    except Exception as error:  # noqa: BLE001  what Triton's compiler and CUDA raise has no common kind
        return Trial(config, None, f"{type(error).__name__}: {str(error)[:200]}")
    return Trial(config, timing.p50)
