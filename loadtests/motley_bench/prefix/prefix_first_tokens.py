"""Part of `motley bench prefix`: how soon a new replica produces its first token, depending on where the prefix is."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from motley.cluster.prefix_store.redis_source import RedisSource
from motley.cluster.prefix_store.redis_store import RedisStore
from motley.replicas.engine.engine import EngineCore
from motley.replicas.engine.startup.engine_builder import BuiltEngine, assemble_engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.host.cpu_cores import usable_cores
from motley.replicas.host.measurement_rows import row
from motley.replicas.kv.store.store_access import PrefixStoreAccess
from motley.replicas.loading.model_loader import load_model
from motley.replicas.loading.operator_choice import choose_operators
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.sampling_params import SamplingParams
from motley.replicas.types import BLOCK_TOKENS, Request

from ..checkpoints.random_checkpoint import SHAPES
from ..checkpoints.served_checkpoint import random_checkpoint
from ..sides.side_process import prompt

__all__ = ["QUESTION", "SharedWeightReplicas", "measure_first_tokens"]

QUESTION = 16  # tokens after the prefix, which are new in each request
FLUSH_S = 60.0
_QUEUE_BYTES = 1 << 30


class SharedWeightReplicas:
    """Factory of engines for one model with random weights, which they share as they would share a file.

    threads  threads of each engine; None: all cores
    """

    def __init__(self, shape: str, threads: int | None = None) -> None:
        folder = random_checkpoint(shape)
        self.shape, self.threads = SHAPES[shape], threads or usable_cores()
        torch.set_num_threads(self.threads)
        self._ops, self._why = choose_operators(EngineConfig(threads=threads), inspect_checkpoint(folder).config.dtype)
        self._loaded = load_model(folder, self._ops)
        shape_of, itemsize = self._loaded.config, self._ops.dtype.itemsize
        self._token_bytes = 2 * shape_of.num_layers * math.prod(shape_of.kv_shape) * itemsize

    def engine(self, kv_tokens: int, access: PrefixStoreAccess | None = None, after: int = 2) -> BuiltEngine:
        """Return a warmed-up engine with KV for that many tokens."""
        blocks = -(-kv_tokens // BLOCK_TOKENS) + 1
        config = EngineConfig(
            threads=self.threads, kv_memory_bytes=blocks * BLOCK_TOKENS * self._token_bytes, prefix_after=after,
            max_running=8, max_model_len=kv_tokens,
        )  # fmt: skip
        built = assemble_engine(self._loaded, config, self._ops, name="bench", why=self._why, access=access)
        built.warm_up()
        return built


def bench_prefix_access(url: str, secret: bytes) -> PrefixStoreAccess:
    source = RedisSource(url=url, secret=secret, queue_bytes=_QUEUE_BYTES)
    return PrefixStoreAccess(RedisStore(source), secret)


def measure_first_tokens(
    replicas: SharedWeightReplicas, name: str, url: str, secret: bytes, lengths: Sequence[int], repeats: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """Measure the time to first token for prefixes of several lengths, which one replica stored and another one reads.

    The reader's KV has nothing of the prefix at first. A third replica, without a store, measures how long computing
    the prefix again takes.
    """
    capacity = max(lengths) + QUESTION + 1
    alone = replicas.engine(capacity)
    writer, reader = (replicas.engine(capacity, bench_prefix_access(url, secret), after) for after in (1, 2))
    try:
        rows, medians = [], []
        for length in lengths:
            say(f"a prefix of {length} tokens")
            found, reused = _samples(alone, writer, reader, replicas.shape.vocab_size, length, repeats)
            workload = {"shape": name, "prefix_tokens": length, "question_tokens": QUESTION}
            for where in ("redis", "local"):
                reported = {**workload, "reused_tokens": reused[where]}
                rows.append(
                    row(f"ttft_{where}_hit", reported, "ms", found[where], peer="recompute",
                        peer_samples=found["recompute"], higher_is_better=False)
                )  # fmt: skip
            medians.append((length, statistics.median(found["recompute"]), statistics.median(found["redis"])))
        stats = reader.prefix_stats()
        assert stats is not None
        outcomes = dict(stats.outcomes)
        even = break_even(medians, stats.value_tokens)
        reported = {"shape": name, "value_tokens": stats.value_tokens, "fetches": outcomes}
        return [*rows, *([row("break_even_prefix", reported, "tokens", [even])] if even is not None else [])]
    finally:
        for built in (alone, writer, reader):
            built.close()


def _samples(
    alone: BuiltEngine, writer: BuiltEngine, reader: BuiltEngine, vocabulary: int, length: int, repeats: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return the milliseconds of each way to the first token, and the fewest tokens that were reused."""
    tokens = prompt(length + QUESTION, vocabulary, length)
    first_token(writer.core, tokens)
    writer.flush(FLUSH_S)
    samples: dict[str, list[float]] = {"recompute": [], "redis": [], "local": []}
    reused = dict.fromkeys(samples, length)
    for _ in range(repeats):
        for way, built in (("recompute", alone), ("redis", reader), ("local", reader)):
            if way != "local":
                built.core.scheduler.pool.forget_prefixes()
            seconds, cached = first_token(built.core, tokens)
            samples[way].append(1e3 * seconds)
            reused[way] = min(reused[way], cached)
            built.flush(FLUSH_S)
    return samples, reused


def first_token(core: EngineCore, tokens: Sequence[int]) -> tuple[float, int]:
    """Return the seconds until the first token, and how many tokens of the prompt were not computed for it."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0)
    began = time.perf_counter()
    core.add(0, Request("bench", tuple(tokens), params))
    while True:
        for emission in core.step():
            if emission.error is not None:
                raise emission.error
            if emission.done:
                return time.perf_counter() - began, emission.message.cached_tokens or 0


def break_even(medians: Sequence[tuple[int, float, float]], value_tokens: int) -> float | None:
    """Return the prefix length in tokens from which Redis is faster; None if it never is.

    Straight lines are fitted through (tokens, recomputed, from Redis). The result is at least the length of a value,
    since shorter prefixes are not stored.
    """
    lengths = [float(length) for length, _, _ in medians]
    if len(lengths) < 2:
        return None
    computed, fetched = (statistics.linear_regression(lengths, [each[at] for each in medians]) for at in (1, 2))
    if computed.slope <= fetched.slope:
        return None
    return max(float(value_tokens), (fetched.intercept - computed.intercept) / (computed.slope - fetched.slope))
