"""Benchmark `motley bench accuracy`: what other arithmetic over the same weights does to a model's next tokens.

The reference computes in fp32 with every weight written out. It says nothing of what quantizing the weights cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from motley.replicas.engine.startup.engine_builder import BuiltEngine, build_engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.host.measurement_rows import machine, versions

from .held_out_text import WINDOW, QualityDifference, next_token_logprobs, token_windows

Progress = Callable[[str, int, int], None]  # name of the current step, number of steps begun, total number of steps
Settings = Mapping[str, Any]

REFERENCE: Settings = {"dtype": "float32", "cpu_weights": "dense"}
CPU_SETTINGS: Sequence[Settings] = (
    {"dtype": "float32"},
    {"dtype": "float32", "kv_dtype": "int8"},
    {"dtype": "float32", "cpu_weights": "int8"},
    {"dtype": "bfloat16", "cpu_weights": "dense"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "cpu_weights": "int8"},
    {"dtype": "bfloat16", "kv_dtype": "int8"},
    {"dtype": "bfloat16", "numerics": "fast"},
)
GPU_SETTINGS: Sequence[Settings] = ({}, {"kv_dtype": "int8"})
_KV_BYTES = 256 << 20


def run(
    path: Path,
    text: str,
    *,
    device: str = "cpu",
    tokens: int = 4096,
    threads: int | None = None,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Run `motley bench accuracy` and return its report.

    path  folder of a checkpoint with a tokenizer; the reference is computed on a CPU whatever `device` is
    text  text that the model was not trained on; its first `tokens` tokens are used, in windows of 512

    Raises ValueError where there is nothing to predict, CheckpointError, InvalidRequest.
    """
    before = machine()
    settings = CPU_SETTINGS if device == "cpu" else GPU_SETTINGS
    total = 1 + len(settings)
    progress("the reference, in fp32", 1, total)
    built = _build(path, "cpu", threads, REFERENCE)
    pieces = token_windows(built, text, tokens)
    wanted = [next_token_logprobs(built, piece).float() for piece in pieces]  # half the memory: 0.4 GB for 2,048 tokens
    name = built.profile.model.name
    del built
    rows: list[dict[str, Any]] = []
    described: dict[str, Any] = {}
    for number, each in enumerate(settings, 2):
        title = ", ".join(f"{name} {value}" for name, value in each.items()) or "as it is chosen"
        progress(title, number, total)
        built = _build(path, device, threads, each)
        difference = QualityDifference()
        for piece, reference in zip(pieces, wanted, strict=True):
            difference.add(piece, reference.double(), next_token_logprobs(built, piece).cpu())
        rows += difference.rows({**each, "tokens": difference.count}, "divergence", "fp32")
        described[title] = dict(built.choices)
        del built
    after = {"load_average_1min_after": machine()["load_average_1min"]}
    gpu = {} if device == "cpu" else {"gpu": torch.cuda.get_device_name(device)}
    return {
        "bench": "accuracy",
        "machine": before | after | gpu,
        "versions": versions("motley", "torch"),
        "model": name,
        "window": WINDOW,
        "sides": described,
        "rows": rows,
    }


def _build(path: Path, device: str, threads: int | None, settings: Settings) -> BuiltEngine:
    config = EngineConfig(device=device, threads=threads, reuse_prefixes=False, kv_memory_bytes=_KV_BYTES, **settings)
    return build_engine(path, config)
