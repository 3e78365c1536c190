"""Part of `motley bench prefix`: what Redis would save on GPUs that this machine does not have.

Its rows are simulated and marked as such.

Prefill takes the time of the roofline and the share of it that kernels are assumed to reach. The rate at which prefixes
come from Redis into host memory is the one measured on this machine in the same run. The way from there to the GPU does
not count, since its bus is much faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from motley.replicas.host.measurement_rows import row
from motley.replicas.simulated.simulated_device import SimulatedDevice, find_model_shape, find_table_device

GPUS = ("P40", "T4", "A10", "H100")
MODEL = "qwen2.5-7b"
CHUNK = 512  # prompt tokens of a step


def simulate_savings(
    bytes_per_s: float, token_bytes: int, value_tokens: int, lengths: Sequence[int], question: int
) -> list[dict[str, Any]]:
    """Return rows with the time to first token with Redis and without, on each GPU of GPUS.

    token_bytes  bytes of a token's KV in a value
    question     tokens after the prefix
    """
    rows = []
    for name in GPUS:
        device = SimulatedDevice(find_table_device(name), find_model_shape(MODEL))
        workload = {"gpu": device.device.name, "model": MODEL, "redis_gb_per_s": round(bytes_per_s / 1e9, 2)}

        def computed_s(tokens: int, device: SimulatedDevice = device) -> float:
            return prefill_s(device, 0, tokens + question)

        def fetched_s(tokens: int, device: SimulatedDevice = device) -> float:
            return tokens * token_bytes / bytes_per_s + prefill_s(device, tokens, question)

        for length in lengths:
            rows.append(
                row("ttft_redis_hit", {**workload, "prefix_tokens": length}, "ms", [1e3 * fetched_s(length)],
                    peer="recompute", peer_samples=[1e3 * computed_s(length)], higher_is_better=False)
            )  # fmt: skip
        tried = range(max(lengths), 0, -value_tokens)  # from longer to shorter, as long as Redis is faster
        pays = list(itertools.takewhile(lambda n: fetched_s(n) < computed_s(n), tried))
        if even := min(pays, default=0):
            rows.append(row("break_even_prefix", {**workload, "value_tokens": value_tokens}, "tokens", [float(even)]))
    return [{**each, "source": "simulated"} for each in rows]


def prefill_s(device: SimulatedDevice, cached: int, new: int) -> float:
    """Return the seconds to compute `new` tokens after `known` ones, in chunks."""
    starts = range(cached, cached + new, CHUNK)
    return sum(device.step_s(0, 0, [(min(CHUNK, cached + new - start), start)]) for start in starts)
