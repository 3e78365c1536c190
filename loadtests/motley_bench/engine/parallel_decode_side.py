"""Process of one way of `motley bench shards`: `python -m motley_bench.engine.parallel_decode_side FOLDER THREADS RANKS
STAGES`.

It runs an engine as a service does, with the engine's other processes, and reads lines of {"do": "open", "decode",
"sums" or "close", ...}.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any
from unittest.mock import patch

import torch

from motley.kernels.cpu.c_kernels.shm_collectives import ShmCollectives
from motley.replicas.engine.startup.engine_builder import build_engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.sampling_params import SamplingParams
from motley.replicas.types import Request

from ..processes.bench_child import respond
from ..sides.side_process import prompt

_KV_BYTES = 1 << 28


class OpenEngine:
    """Engine of one way to divide a model, with open sequences that continue without end."""

    def __init__(self, folder: str, config: EngineConfig) -> None:
        self._built = build_engine(folder, config)
        self._core = self._built.core
        self._keys = itertools.count()
        self._open: list[int] = []

    def describe(self) -> dict[str, Any]:
        return {"choices": dict(self._built.choices)}

    def open(self, batch: int, context: int) -> dict[str, Any]:
        vocabulary = self._built.profile.model.vocab_size
        sampling = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, seed=0)
        for key in itertools.islice(self._keys, batch):
            ids = tuple(prompt(context, vocabulary, key))
            self._core.add(key, Request(request_id=str(key), prompt_ids=ids, sampling=sampling))
            self._open.append(key)
        self._lap(1)
        return {"open": batch}

    def decode(self, steps: int) -> dict[str, Any]:
        """Decode `steps` tokens of each open sequence, after one that is not counted; return tokens and seconds.

        A pipeline stage may have computed the first one already.
        """
        self._lap(1)
        began = time.perf_counter()
        tokens = self._lap(steps)
        return {"tokens": tokens, "seconds": time.perf_counter() - began}

    def sums(self, steps: int) -> dict[str, Any]:
        """Decode and measure how long this process, rank 0, is in sums over ranks."""
        spent: list[float] = []
        add = ShmCollectives.sum

        def timed(exchange: ShmCollectives, x: torch.Tensor) -> torch.Tensor:
            began = time.perf_counter()
            found = add(exchange, x)
            spent.append(time.perf_counter() - began)
            return found

        with patch.object(ShmCollectives, "sum", timed):
            began = time.perf_counter()
            for _ in range(steps):
                self._core.step()
            seconds = time.perf_counter() - began
        return {"steps": steps, "seconds": seconds, "sums": len(spent), "sum_s": sum(spent)}

    def close(self) -> dict[str, Any]:
        for key in self._open:
            self._core.cancel(key)
        while self._core.busy:
            self._core.step()
        self._open = []
        return {"open": 0}

    def _lap(self, steps: int) -> int:
        """Step until each open sequence has `steps` more tokens; return the number of tokens that all got together."""
        got = dict.fromkeys(self._open, 0)
        while min(got.values()) < steps:
            for emission in self._core.step():
                got[emission.key] += sum(len(delta.token_ids) for delta in emission.message.deltas)
        return sum(got.values())


def main(folder: str, threads: int, ranks: int, stages: int) -> None:
    config = EngineConfig(
        dtype="bfloat16", threads=threads, tensor_parallel=ranks, pipeline_parallel=stages,
        reuse_prefixes=False, kv_memory_bytes=_KV_BYTES,
    )  # fmt: skip
    way = OpenEngine(folder, config)
    respond(way.describe())
    for line in sys.stdin:
        request = json.loads(line)
        respond(getattr(way, request.pop("do"))(**request))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
