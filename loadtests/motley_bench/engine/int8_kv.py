"""Benchmark `motley bench kv`: what int8 KV costs in quality, and gains in memory and speed, beside unquantized KV."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from motley.replicas.engine.startup.engine_builder import BuiltEngine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.host.measurement_rows import machine, row, versions
from motley.replicas.model.decoder import Decoder
from motley.replicas.types import BLOCK_TOKENS

from ..sides.side_motley import MotleySide
from .held_out_text import QualityDifference, next_token_logprobs, token_windows, window_length

Progress = Callable[[str, int, int], None]  # name of the current step, number of steps begun, total number of steps

__all__ = ["run"]

DTYPES = ("float32", "bfloat16")  # dtypes of activations on a CPU; a GPU's policy chooses its own
_KV_BYTES = 1 << 30  # KV memory of each side
_STEPS = 8  # decode steps of one side before the other side has its turn


def run(
    path: Path,
    text: str,
    *,
    device: str = "cpu",
    dtypes: Sequence[str] | None = None,
    tokens: int = 4096,
    batches: Sequence[int] = (1, 8),
    contexts: Sequence[int] = (128, 1024),
    output_tokens: int = 64,
    threads: int | None = None,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Run `motley bench kv` and return its report; both sides are in one process and take turns.

    path               folder of a checkpoint with a tokenizer
    text               text that the model was not trained on; its first `tokens` tokens are used, in windows of 512
    dtypes             dtypes of activations; None: float32 and bfloat16 on a CPU, the GPU's own on a GPU
    batches, contexts  numbers of sequences that decode together, and tokens of each in KV: every pair is measured

    Raises ValueError for sizes that do not fit the model, CheckpointError, InvalidRequest.
    """
    wanted = list(dtypes or (DTYPES if device == "cpu" else ("auto",)))
    before = machine()
    rows: list[dict[str, Any]] = []
    described: dict[str, Any] = {}
    total = len(wanted) * (2 + len(batches) * len(contexts))
    steps = iter(range(1, total + 1))
    for dtype in wanted:
        progress(f"loading, activations in {dtype}", next(steps), total)
        config = EngineConfig(
            device=device, dtype=dtype, threads=threads, reuse_prefixes=False, kv_memory_bytes=_KV_BYTES,
            max_running=max(64, *batches), max_batch_tokens=max(512, *batches),
        )  # fmt: skip
        sides = _KvSides(path, config)
        sides.check(batches, contexts, output_tokens)
        progress(f"{tokens} tokens of text, activations in {dtype}", next(steps), total)
        rows += [*_quality(sides, text, tokens), _memory(sides)]
        for batch, context in itertools.product(batches, contexts):
            progress(f"decode at batch {batch} after {context} tokens", next(steps), total)
            rows.append(_decode(sides, batch, context, output_tokens))
        described[sides.dtype] = {"model": sides.name, "choices": dict(sides.int8.built.choices)}
    after = {"load_average_1min_after": machine()["load_average_1min"]}
    return {
        "bench": "kv",
        "machine": before | after | _gpu(device),
        "versions": versions("motley", "torch"),
        "sides": described,
        "rows": rows,
    }


class _KvSides:
    """One model loaded twice: with KV in int8, and with KV in the dtype of its activations."""

    def __init__(self, path: Path, config: EngineConfig) -> None:
        self.int8, self.plain = MotleySide(path, replace(config, kv_dtype="int8")), MotleySide(path, config)
        info = self.plain.built.profile.model
        self.name, self.dtype, self.peer = info.name, info.dtype, f"KV in {info.dtype}"

    def check(self, batches: Sequence[int], contexts: Sequence[int], output_tokens: int) -> None:
        """Raise ValueError unless sequences of these lengths and numbers fit both sides."""
        for built in (self.int8.built, self.plain.built):
            longest, capacity = built.core.limits.max_model_len, built.profile.kv_blocks_total
            each = max(contexts) + output_tokens + _STEPS + 2
            if each > longest:
                raise ValueError(
                    f"context: {max(contexts)} and {output_tokens} more tokens exceed the model's {longest}"
                )
            if max(batches) * -(-each // BLOCK_TOKENS) > capacity:
                raise ValueError(
                    f"batch: {max(batches)} sequences of {each} tokens do not fit into {capacity} KV blocks"
                )


def _quality(sides: _KvSides, text: str, tokens: int) -> list[dict[str, Any]]:
    """Return rows on how far the two sides' distributions of the next token are apart, over the same text."""
    pieces = token_windows(sides.plain.built, text, tokens)
    difference = QualityDifference()
    for piece in pieces:
        plain, int8 = (next_token_logprobs(side.built, piece) for side in (sides.plain, sides.int8))
        difference.add(piece, plain, int8)
    workload = {"dtype": sides.dtype, "tokens": difference.count, "window": window_length(sides.plain.built)}
    return difference.rows(workload, "divergence, KV in int8", sides.peer)


def _memory(sides: _KvSides) -> dict[str, Any]:
    ours, theirs = ([_bytes_per_1000(side.built)] for side in (sides.int8, sides.plain))
    return row(
        "KV of 1,000 tokens", {"dtype": sides.dtype}, "bytes", ours, peer=sides.peer, peer_samples=theirs,
        higher_is_better=False,
    )  # fmt: skip


def _bytes_per_1000(built: BuiltEngine) -> float:
    model = built.runner.model
    assert isinstance(model, Decoder)
    config = model.config
    block = model.ops.allocate_kv(config.num_layers, 1, *config.kv_shape)
    return sum(cache.nbytes for cache in block) * 1000 / BLOCK_TOKENS


def _decode(sides: _KvSides, batch: int, context: int, tokens: int) -> dict[str, Any]:
    samples: dict[str, list[float]] = {"int8": [], "plain": []}
    pairs = [("int8", sides.int8), ("plain", sides.plain)]
    for _, side in pairs:
        side.open(batch, context)
        side.decode(2)  # warms up
    for _ in range(-(-tokens // _STEPS)):
        for name, side in pairs:
            samples[name] += [batch / seconds for seconds in side.decode(_STEPS)]
    for _, side in pairs:
        side.close()
    workload = {"dtype": sides.dtype, "batch": batch, "context_tokens": context}
    return row("decode", workload, "tokens/s", samples["int8"], peer=sides.peer, peer_samples=samples["plain"])


def _gpu(device: str) -> dict[str, Any]:
    return {} if device == "cpu" else {"gpu": torch.cuda.get_device_name(device)}
