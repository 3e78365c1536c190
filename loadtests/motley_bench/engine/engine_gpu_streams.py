"""Benchmark `motley bench engine --device cuda`: the worker under concurrent streams, beside transformers, on one GPU.

The sides use the GPU one after the other, each in a process of its own, since Motley's takes all free memory for KV. A
measurement that fails affects no other: its error is recorded, and the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from motley.replicas.engine_config import MAX_DRAFTS
from motley.replicas.host.measurement_rows import machine, versions

from ..checkpoints.random_model import config_of
from ..sides.side_handles import is_installed
from .stream_measurement import IDLE_BATCHES, MAX_STREAMS, EngineMeasurement, StreamWorkload, WorkloadGroup

PEERS = ("transformers",)
BATCHES = (1, 8, 64, 256)
LENGTHS = ((128, 128), (1000, 1000), (2048, 128))  # tokens of a prompt, tokens of its output

Progress = Callable[[str, int, int], None]  # name of the current step, number of steps begun, total number of steps


def groups_of(
    shapes: Sequence[str],
    batches: Sequence[int],
    lengths: Sequence[tuple[int, int]],
    peers: Sequence[str],
    drafts: int = 0,
) -> list[WorkloadGroup]:
    """Return the groups that measure every batch at every length, for each shape and each side.

    Motley comes before the peers, and it alone has `drafts`.
    """
    cells = tuple(StreamWorkload(batch, *length) for length in lengths for batch in batches)
    return [
        WorkloadGroup(shape, side, cells, IDLE_BATCHES, drafts=drafts)
        if side == "motley"
        else WorkloadGroup(shape, side, cells)
        for shape in shapes
        for side in ("motley", *peers)
    ]


def run(
    *,
    shapes: Sequence[str],
    batches: Sequence[int] = BATCHES,
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    peers: Sequence[str] = PEERS,
    device: str = "cuda",
    seconds: float = float("inf"),
    out: Path = Path(),
    speculate_ngram: int = 0,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Run `motley bench engine --device cuda` and return its report.

    seconds          time limit: a measurement that has not begun by then is left out and listed as such
    speculate_ngram  run the streams once more with at most so many n-gram drafts per step; how many are accepted
                     depends on the text, and a model of random weights repeats itself more than most

    Raises ValueError for a shape, peer, batch or length that is not accepted, RuntimeError without a GPU.
    """
    for shape in shapes:
        config_of(shape)
    if unknown := [name for name in peers if name not in PEERS]:
        raise ValueError(f"peer: {unknown[0]!r} is not known on a GPU; expected {' or '.join(PEERS)}")
    if wrong := [batch for batch in batches if not 1 <= batch <= MAX_STREAMS]:
        raise ValueError(f"batch: {wrong[0]} is not accepted; expected 1 to {MAX_STREAMS}")
    if not 0 <= speculate_ngram <= MAX_DRAFTS:
        raise ValueError(f"speculate_ngram: {speculate_ngram} is not accepted; expected 0 to {MAX_DRAFTS}")
    about = machine() | about_device(device)
    installed = [name for name in peers if is_installed(name)]
    groups = groups_of(shapes, batches, lengths, installed, speculate_ngram)
    began, steps = time.monotonic(), sum(1 + len(group.cells) + len(group.idle) for group in groups)
    begun = iter(range(1, 10 * steps))
    measuring = EngineMeasurement(
        device, out, lambda share: began + share * seconds - time.monotonic(),
        lambda what: progress(what, min(next(begun), steps), steps),
    )  # fmt: skip
    for group in groups:
        measuring.group(group)
    return {
        "bench": "engine",
        "machine": about,
        "versions": versions("motley", "torch", "triton", "transformers"),
        "sides": measuring.sides,
        "rows": measuring.rows,
        "found": measuring.found,
        "cut": measuring.cut,
    }


def about_device(device: str) -> dict[str, Any]:
    """Return the name, the number of multiprocessors (SMs) and the memory in bytes of a GPU. Raises RuntimeError if
    there is none.
    """
    import torch

    if device == "cpu":
        return {"rehearsal": True}
    if not torch.cuda.is_available():
        raise RuntimeError("device: there is no CUDA device that torch can use; motley doctor tells why")
    properties = torch.cuda.get_device_properties(device)
    return {"gpu": properties.name, "sms": properties.multi_processor_count, "memory": properties.total_memory}
