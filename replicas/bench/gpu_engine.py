"""The engine on the operators of a GPU, beside the engine of the CPU in fp32: the same greedy tokens?"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...kernels.device.device_context import DeviceContext
from ...kernels.gpu.gpu_ops import GpuOps
from ..gpu.accelerator import Accelerator
from ..offline import CompletionOutput, Engine
from ..sampling_params import SamplingParams
from .shapes import SHAPES, Shape, write_gptq

__all__ = ["NOISE", "Beside", "answers", "beside", "compare", "texts"]

SHAPE = SHAPES["tiny"]
REHEARSAL = Shape(128, 128, 1, 2, 1, 512)  # the least that the kernels take
PROMPTS = ([3, 141, 59, 26, 5], list(range(40, 60)), [7, 7, 9])  # three: the graph of their steps is padded
# Of what the CPU's engine in bf16 differs by from fp32: fp16 rounds eight times finer.
NOISE = {"fp16": 0.5, "bf16": 2.0}


@dataclass(slots=True)
class Beside:
    """Answers beside those in fp32, up to where a text parts from its own.

    equal    tokens
    apart    the largest difference of a log-probability
    closest  where texts part, how far apart in fp32 the two tokens were: the largest of these
    """

    equal: int = 0
    apart: float = 0.0
    closest: float = 0.0

    def add(self, found: CompletionOutput, expected: CompletionOutput) -> None:
        for mine, theirs in zip(found.logprobs or (), expected.logprobs or (), strict=True):
            if mine.token_id != theirs.token_id:
                gap = theirs.logprob - dict(theirs.top).get(mine.token_id, float("-inf"))
                self.closest = max(self.closest, gap)
                return
            self.equal += 1
            self.apart = max(self.apart, abs(mine.logprob - theirs.logprob))


def compare(
    rig: DeviceContext, max_tokens: int, accelerator: Callable[[], Accelerator | None] = lambda: None
) -> dict[str, Any]:
    """`right`: no text parts but where two tokens are as near in fp32 as the arithmetic's noise; that is bounded.

    Where decode runs as graphs, texts are also those of steps that run as they come, token for token.

    accelerator  a stand-in for each engine; None: on a GPU its own, else there are no graphs
    """
    with tempfile.TemporaryDirectory(prefix="motley-bench-") as folder:
        write_gptq(SHAPE if rig.real else REHEARSAL, Path(folder))
        exact = answers(Engine(folder, dtype="float32", threads=1), max_tokens)
        rough = beside(answers(Engine(folder, dtype="bfloat16", threads=1), max_tokens), exact)
        # Neither of the two that are compared may find what it has answered before: they would prefill other rows.
        ours_of = partial(Engine, folder, threads=1, reuse_prefixes=False)
        engine = ours_of(ops=GpuOps(rig), accelerator=accelerator())
        ours = beside(answers(engine, max_tokens), exact)
        graphs: list[list[int]] = []
        steps: list[list[int]] = []
        stand_in = accelerator()
        if has_graphs := rig.real or stand_in is not None:
            graphs = texts(engine, max_tokens)
            as_they_come = ours_of(ops=GpuOps(rig), accelerator=stand_in, graphs=False)
            steps = texts(as_they_come, max_tokens)
    allowed = NOISE[rig.policy.storage] * rough.apart
    return {
        "shape": asdict(SHAPE if rig.real else REHEARSAL),
        "tokens": max_tokens * len(PROMPTS),
        "equal_to_fp32": ours.equal,
        "largest_difference": ours.apart,
        "allowed_difference": allowed,
        "gap_where_texts_part": ours.closest,
        "graphs_as_steps": graphs == steps if has_graphs else "no graphs without a GPU",
        "right": ours.apart <= allowed and ours.closest <= 2 * allowed and graphs == steps,
    }


def texts(engine: Engine, max_tokens: int) -> list[list[int]]:
    """Chosen on the device: greedy, and seeded with filters."""
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    seeded = SamplingParams(max_tokens=max_tokens, top_k=50, top_p=0.95, seed=1, ignore_eos=True)
    return [result.token_ids for params in (greedy, seeded) for result in engine.generate(PROMPTS, params)]


def beside(found: Sequence[CompletionOutput], expected: Sequence[CompletionOutput]) -> Beside:
    beside = Beside()
    for one, other in zip(found, expected, strict=True):
        beside.add(one, other)
    return beside


def answers(engine: Engine, max_tokens: int) -> list[CompletionOutput]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=5, ignore_eos=True)
    return [output for result in engine.generate(PROMPTS, params) for output in result.outputs]
