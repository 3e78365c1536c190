"""One side of `motley bench tiers`: `python -m …tiers_child FOLDER THREADS BUDGET TOKENS WHAT`.

    serve  load it, with so much memory for weights (0: all), and decode
    fit    tell how fast that would be, as `motley fit` does

Answers with one line.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from .child import answer

PROMPT = tuple(range(100, 116))
_KV_BYTES = 2**24
_SKIPPED = 2  # steps before those that count


def main(folder: Path, threads: int, budget: int, tokens: int, what: str) -> None:
    answer(_fit(folder, threads, budget) if what == "fit" else _serve(folder, threads, budget, tokens))


def _serve(folder: Path, threads: int, budget: int, tokens: int) -> dict[str, Any]:
    from ..build import build_engine
    from ..engine_config import EngineConfig
    from ..protocol import Request
    from ..sampling_params import SamplingParams
    from ..tiers.tier import Tier

    config = EngineConfig(
        dtype="bfloat16", threads=threads, kv_memory_bytes=_KV_BYTES, max_batch_tokens=len(PROMPT), max_running=1,
        weights_cache=str(folder / "cache") if budget else "off", weights_memory_bytes=budget or None,
    )  # fmt: skip
    small = replace(config, weights_cache="off", weights_memory_bytes=None)
    build_engine(folder / "small", small).close()  # code and libraries, which are no weights
    before = _status("VmRSS")
    built = build_engine(folder / "model", config)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0)
    built.core.add(1, Request("bench", PROMPT, params))
    ids: list[int] = []
    steps: list[float] = []
    while built.core.busy:
        began = time.perf_counter()
        for emission in built.core.step():
            if emission.error is not None:
                raise emission.error
            ids += [token for delta in emission.message.deltas for token in delta.token_ids]
        steps.append(time.perf_counter() - began)
    found: dict[str, Any] = {
        "ids": ids, "steps": steps[1 + _SKIPPED :], "peak": _status("VmHWM") - before,
        "weights": built.weights.loaded.weight_bytes if built.weights is not None else 0,
    }  # fmt: skip
    decoder = built.weights.loaded.decoder if built.weights is not None else None
    if decoder is not None and isinstance(tier := decoder.tier, Tier) and (expected := tier.expected) is not None:
        found |= {
            "layers": len(tier.plan.on_disk), "on disk": len(tier.plan.layers), "read": tier.plan.read_bytes,
            "expected": expected.tokens_per_s, "GB/s": (expected.bytes_per_s or 0.0) / 1e9,
            "compute_s": expected.compute_s,
        }  # fmt: skip
    built.close()
    return found


def _fit(folder: Path, threads: int, budget: int) -> dict[str, Any]:
    import torch

    from ..build import operators
    from ..checkpoint import inspect_checkpoint
    from ..early import kept_file
    from ..engine_config import EngineConfig
    from ..fit import Asked, cpu, fit
    from ..tiers.plan import Tiers
    from ..tiers.speed import reckoned

    torch.set_num_threads(threads)
    config, inspected = EngineConfig(dtype="bfloat16"), inspect_checkpoint(folder / "model")

    def ops() -> Any:
        return operators(config, inspected.config.dtype)[0]

    tiers = fit(inspected, cpu(ops), Asked(len(PROMPT), 1, weights_memory_bytes=budget)).tiers
    assert isinstance(tiers, Tiers), "it was served with this budget"
    kept = kept_file(folder / "model", str(folder / "cache"))
    return {"expected": reckoned(inspected, ops(), tiers, kept).tokens_per_s}


def _status(name: str) -> int:
    """Bytes, of this process."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    threads, budget, tokens = map(int, sys.argv[2:5])
    main(Path(sys.argv[1]), threads, budget, tokens, sys.argv[5])
