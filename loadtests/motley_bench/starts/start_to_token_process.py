"""Process of one start for `motley bench load`.

It is `python -m …start_to_token_process CHECKPOINT CACHE THREADS DEVICE WHAT [HOW]`. It answers with one
line: the monotonic times of the moments that it reached, and its peak memory; or, if it only reads, bytes and seconds.
"""

from __future__ import annotations

import mmap
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..processes.bench_child import respond

PROMPT = tuple(range(100, 116))
_BLOCK = 4 << 20


def main(checkpoint: Path, cache: Path, threads: int, device: str, what: str, how: str = "") -> None:
    if what == "read":
        respond(_read(checkpoint, how, threads))
        return
    if what == "transformers":
        found = _transformers(checkpoint, threads, device)
    else:
        if how == "waited":
            _wait()
        found = _motley(checkpoint, cache, threads, device, what, as_replica=how in ("ready", "waited"))
    found["MiB"] = max(found.get("MiB", 0), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    respond(found)


def _motley(checkpoint: Path, cache: Path, threads: int, device: str, what: str, *, as_replica: bool) -> dict[str, Any]:
    """Start Motley's engine, compute one token, and return the times.

    as_replica  run the engine once and measure how fast it is before the first request, as a replica does
    """
    from motley.replicas.checkpoint.cache.startup_prefetch import prefetch_model
    from motley.replicas.engine_config import EngineConfig
    from motley.replicas.host.garbage_collection import pause_gc

    cache_folder = str(cache) if what == "second start" else tempfile.mkdtemp(dir=cache.parent)
    config = EngineConfig(device=device, threads=threads, weights_cache=cache_folder)
    with pause_gc():  # as in a replica
        prefetch_model(checkpoint, config)
        from motley.replicas.checkpoint.cache.weights_cache import WRITER
        from motley.replicas.engine.startup.engine_builder import build_engine
        from motley.replicas.sampling_params import SamplingParams
        from motley.replicas.types import Request

        times = {"imported": time.monotonic()}
        built = build_engine(checkpoint, config)
        if device != "cpu":
            import torch

            torch.cuda.synchronize()
        times["loaded"] = time.monotonic()
        if as_replica:
            built.warm_up()
            times["ready"] = time.monotonic()
    built.core.add(1, Request("bench", PROMPT, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0)))
    while built.core.busy:
        built.core.step()
    times["first token"] = time.monotonic()
    built.close()
    for thread in threading.enumerate():
        if thread.name == WRITER and what == "second start":  # the parent ends this process once it has the answer
            thread.join()
    return times


def _wait() -> None:
    """Import all that a replica imports, then wait for the parent."""
    from motley.replicas.engine.entrypoints import worker  # noqa: F401
    from motley.replicas.engine.startup import engine_builder  # noqa: F401

    _report_later()


def _report_later() -> None:
    """Report that this process waits, and return once the parent, which prepares the page cache meanwhile, says to go
    on.
    """
    respond({"waits": True})
    sys.stdin.readline()


def _transformers(checkpoint: Path, threads: int, device: str) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    times = {"imported": time.monotonic()}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to(device)
    if device != "cpu":
        torch.cuda.synchronize()
    times["loaded"] = time.monotonic()
    ids = torch.tensor([PROMPT], device=device)
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=1, min_new_tokens=1)
    times["first token"] = time.monotonic()
    return times


def _read(checkpoint: Path, reader: str, threads: int) -> dict[str, Any]:
    files = sorted(checkpoint.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    if reader == "raw":
        # A buffer aligned to pages: into memory that is not, AMD's cores copy at a fifth of the rate.
        buffer = mmap.mmap(-1, _BLOCK)
        _report_later()
        began = time.perf_counter()
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
    elif reader in ("read", "hashed"):
        from motley.kernels.cpu.memory import prefault

        prefault.start_prefault(size)  # while torch is imported, as in a start
        from concurrent.futures import ThreadPoolExecutor

        from motley.replicas.checkpoint.cache.startup_prefetch import prefetch_files
        from motley.replicas.checkpoint.reading.tensor_reader import TensorReader
        from motley.replicas.host.garbage_collection import pause_gc
        from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
        from motley.replicas.model.tensor_layout import EMBEDDING

        _report_later()
        began = time.perf_counter()
        prefetch_files(files)  # a start does this before it imports torch
        tensors = inspect_checkpoint(checkpoint).tensors
        order = sorted(tensors, key=lambda name: (tensors[name][0], tensors[name][1].begin))
        weights = TensorReader(tensors, order, digests=reader == "hashed", whole=True)

        def touched(names: Sequence[str]) -> None:  # then released, as after repacking
            for name in names:
                weights.whole(name, retained=name == EMBEDDING)

        with pause_gc(), ThreadPoolExecutor(threads) as pool:  # as in a replica
            list(pool.map(touched, weights.extents))
        weights.close()
    else:
        import torch
        from safetensors.torch import load_file

        torch.set_num_threads(threads)
        _report_later()
        began = time.perf_counter()
        for path in files:
            for tensor in load_file(path).values():
                tensor.view(-1).view(torch.uint8)[:: os.sysconf("SC_PAGE_SIZE")].sum()
    return {"bytes": size, "seconds": time.perf_counter() - began}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
