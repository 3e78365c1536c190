"""Comparison of the engine with a GPU's operators and the engine of the CPU in fp32: whether greedy tokens are the
same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from motley.kernels.device.device_context import DeviceContext
from motley.kernels.gpu.gpu_ops import GpuOps
from motley.replicas.engine.entrypoints.offline import CompletionOutput, Engine
from motley.replicas.gpu.accelerator import Accelerator
from motley.replicas.sampling_params import SamplingParams

from ..checkpoints.random_checkpoint import SHAPES, CheckpointShape, write_gptq

SHAPE = SHAPES["tiny"]
REHEARSAL = CheckpointShape(128, 128, 1, 2, 1, 512)  # the smallest sizes that the kernels accept
PROMPTS = ([3, 141, 59, 26, 5], list(range(40, 60)), [7, 7, 9])  # three: the graph of their steps is padded
# Allowed difference, as a multiple of the difference between the CPU's bf16 and fp32; fp16 rounds eight times finer.
NOISE = {"fp16": 0.5, "bf16": 2.0}


@dataclass(slots=True)
class LogprobComparison:
    """Differences between an engine's outputs and those in fp32, up to the first token where two texts differ.

    equal    number of equal tokens
    apart    largest difference of a log-probability
    closest  largest difference in fp32 between the log-probabilities of the two tokens at which texts first differ
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
    device_context: DeviceContext, max_tokens: int, accelerator: Callable[[], Accelerator | None] = lambda: None
) -> dict[str, Any]:
    """Compare a small model's texts on the GPU's operators with those of the CPU in fp32.

    `right` in the result means that texts differ only where two tokens are nearly equally likely in fp32, within
    bounded rounding noise, and that texts from CUDA graphs equal those from plain steps, token for token.

    accelerator  returns a stand-in for each engine; if it returns None, the engine uses the GPU's own, and without a
                 GPU there are no graphs
    """
    with tempfile.TemporaryDirectory(prefix="motley-bench-") as folder:
        write_gptq(SHAPE if device_context.real else REHEARSAL, Path(folder))
        exact = outputs(Engine(folder, dtype="float32", threads=1), max_tokens)
        rough = beside(outputs(Engine(folder, dtype="bfloat16", threads=1), max_tokens), exact)
        # No prefix reuse: an engine that found its earlier KV would prefill other rows than the other engine.
        ours_of = partial(Engine, folder, threads=1, reuse_prefixes=False)
        engine = ours_of(ops=GpuOps(device_context), accelerator=accelerator())
        ours = beside(outputs(engine, max_tokens), exact)
        graphs: list[list[int]] = []
        steps: list[list[int]] = []
        stand_in = accelerator()
        if has_graphs := device_context.real or stand_in is not None:
            graphs = texts(engine, max_tokens)
            as_they_come = ours_of(ops=GpuOps(device_context), accelerator=stand_in, graphs=False)
            steps = texts(as_they_come, max_tokens)
    allowed = NOISE[device_context.policy.storage] * rough.apart
    return {
        "shape": asdict(SHAPE if device_context.real else REHEARSAL),
        "tokens": max_tokens * len(PROMPTS),
        "equal_to_fp32": ours.equal,
        "largest_difference": ours.apart,
        "allowed_difference": allowed,
        "gap_where_texts_part": ours.closest,
        "graphs_as_steps": graphs == steps if has_graphs else "no graphs without a GPU",
        "right": ours.apart <= allowed and ours.closest <= 2 * allowed and graphs == steps,
    }


def texts(engine: Engine, max_tokens: int) -> list[list[int]]:
    """Return the token ids of all prompts, greedy and then seeded with top-k and top-p; they are sampled on the
    device.
    """
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    seeded = SamplingParams(max_tokens=max_tokens, top_k=50, top_p=0.95, seed=1, ignore_eos=True)
    return [result.token_ids for params in (greedy, seeded) for result in engine.generate(PROMPTS, params)]


def beside(found: Sequence[CompletionOutput], expected: Sequence[CompletionOutput]) -> LogprobComparison:
    beside = LogprobComparison()
    for one, other in zip(found, expected, strict=True):
        beside.add(one, other)
    return beside


def outputs(engine: Engine, max_tokens: int) -> list[CompletionOutput]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=5, ignore_eos=True)
    return [output for result in engine.generate(PROMPTS, params) for output in result.outputs]
