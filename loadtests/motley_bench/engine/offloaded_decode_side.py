"""Process of one side of `motley bench tiers`.

It is `python -m …offloaded_decode_side FOLDER THREADS BUDGET TOKENS WHAT DEVICE REST`.

WHAT is one of:

    serve  load the model with BUDGET bytes of memory for weights (0: all of them), and decode
    fit    predict how fast that would be, as `motley fit` does

REST is where layers are that a GPU has no memory for, "host" or "disk"; those of a CPU are on disk. The process answers
with one line.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import InvalidRequest

from ..processes.bench_child import respond

if TYPE_CHECKING:
    from motley.replicas.offload.disk.direct_file import DirectFile

PROMPT = tuple(range(100, 116))
_KV_BYTES = 2**24
_SKIPPED = 2  # first steps, which are not counted


@dataclass(frozen=True)
class TiersSide:
    folder: Path
    threads: int
    budget: int
    tokens: int
    device: str
    rest: str

    @property
    def config(self) -> EngineConfig:
        given: dict[str, Any] = {} if self.device != "cpu" else {"dtype": "bfloat16"}
        return EngineConfig(
            device=self.device, threads=self.threads, kv_memory_bytes=_KV_BYTES, max_batch_tokens=len(PROMPT),
            max_running=1, weights_cache=str(self.folder / "cache") if self.budget else "off",
            weights_memory_bytes=self.budget or None, weights_host_memory_bytes=self._host_bytes, **given,
        )  # fmt: skip

    @cached_property
    def _host_bytes(self) -> int | None:
        """Memory on the host for weights, in bytes: two buffers, if all layers are on disk and pass through them; else
        None.
        """
        if not self.budget or self.device == "cpu" or self.rest == "host":
            return None
        import torch

        from motley.replicas.capacity.device_fit import build_meta_decoder, local_gpu
        from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
        from motley.replicas.offload.planning.device_plan import DevicePlan
        from motley.replicas.offload.planning.weight_budget import weight_sizes

        found = inspect_checkpoint(self.folder / "model")
        outline = build_meta_decoder(
            found.config, found.format, found.tensors, local_gpu(torch.device(self.device)).ops()
        )
        return DevicePlan.all_on("disk", weight_sizes(outline)).host_bytes


def main(side: TiersSide, what: str) -> None:
    try:
        respond(_fit(side) if what == "fit" else _serve(side))
    except InvalidRequest as error:
        respond({"refused": error.message})


def _serve(side: TiersSide) -> dict[str, Any]:
    from motley.replicas.engine.startup.engine_builder import build_engine
    from motley.replicas.offload.device.device_tier import DeviceTier
    from motley.replicas.offload.disk.disk_tier import DiskTier
    from motley.replicas.offload.planning.disk_plan import disk_step_s
    from motley.replicas.sampling_params import SamplingParams
    from motley.replicas.types import Request

    on_gpu = side.device != "cpu"
    small = replace(side.config, weights_cache="off", weights_memory_bytes=None, weights_host_memory_bytes=None)
    build_engine(side.folder / "small", small).close()  # loads code and libraries, which are not counted as weights
    before = _peak_of_gpu(reset=True) if on_gpu else _status("VmRSS")
    built = build_engine(side.folder / "model", side.config)
    if on_gpu:
        built.warm_up()  # its graphs, where it has any
    params = SamplingParams(temperature=0.0, max_tokens=side.tokens, ignore_eos=True, seed=0)
    built.core.add(1, Request("bench", PROMPT, params))
    ids: list[int] = []
    steps: list[float] = []
    tier = built.weights.loaded.decoder.tier if built.weights is not None else None
    files = [place.file for place in tier.places] if isinstance(tier, DiskTier) else []
    reads: list[tuple[int, float]] = []
    while built.core.busy:
        reads.append(_read(files))
        began = time.perf_counter()
        for emission in built.core.step():
            if emission.error is not None:
                raise emission.error
            ids += [token for delta in emission.message.deltas for token in delta.token_ids]
        steps.append(time.perf_counter() - began)
    found: dict[str, Any] = {
        "ids": ids, "steps": steps[1 + _SKIPPED :],
        "peak": (_peak_of_gpu() if on_gpu else _status("VmHWM")) - before,
        "weights": built.weights.loaded.weight_bytes if built.weights is not None else 0,
    }  # fmt: skip
    if isinstance(tier, (DiskTier, DeviceTier)) and tier.expected is not None:
        plan, expected = tier.plan, tier.expected
        found |= {
            "layers": len(plan.sizes.layers), "gone": len(plan.layers), "read": plan.read_bytes,
            "expected": expected.tokens_per_s, "GB/s": (expected.bytes_per_s or 0.0) / 1e9,
            "compute_s": expected.compute_s, "copied GB/s": (expected.copies_per_s or 0.0) / 1e9,
        }  # fmt: skip
    if isinstance(tier, DiskTier) and tier.expected is not None:
        (bytes_before, seconds_before), (nbytes, seconds) = reads[1 + _SKIPPED], _read(files)
        if seconds > seconds_before:
            rate = (nbytes - bytes_before) / (seconds - seconds_before)
            found["meanwhile"] = 1 / disk_step_s(tier.plan, rate, tier.expected.layers_s, tier.expected.rest_s)
    built.close()
    return found


def _read(files: Sequence[DirectFile]) -> tuple[int, float]:
    """Return the number of bytes read from these files so far, and the seconds that took."""
    return sum(file.bytes_read for file in files), sum(file.seconds for file in files)


def _fit(side: TiersSide) -> dict[str, Any]:
    import torch

    from motley.replicas.capacity.device_fit import FitWorkload, fit_model, local_cpu, local_gpu
    from motley.replicas.engine.startup.measured_fit import add_measured_speed
    from motley.replicas.loading.operator_choice import choose_operators
    from motley.replicas.model.checkpoint_inspection import inspect_checkpoint

    config, inspected = side.config, inspect_checkpoint(side.folder / "model")
    on_cpu = side.device == "cpu"
    place = (
        local_cpu(lambda: choose_operators(config, inspected.config.dtype)[0])
        if on_cpu
        else local_gpu(torch.device(side.device))
    )
    memory, host_memory = config.weights_memory_bytes, config.weights_host_memory_bytes
    workload = FitWorkload(len(PROMPT), 1, weights_memory_bytes=memory, weights_host_memory_bytes=host_memory)
    expected = add_measured_speed(fit_model(inspected, place, workload), config, inspected).expected
    assert expected is not None, "it was served with this budget"
    return {"expected": expected.tokens_per_s}


def _peak_of_gpu(*, reset: bool = False) -> int:
    """Return torch's peak memory on the GPU in bytes; `reset` makes the memory in use now the new peak first."""
    import torch

    if reset:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


def _status(name: str) -> int:
    """Return a size of this process from /proc/self/status, in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    folder, *numbers, what, device, rest = sys.argv[1:]
    threads, budget, tokens = map(int, numbers)
    main(TiersSide(Path(folder), threads, budget, tokens, device, rest), what)
