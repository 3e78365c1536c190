"""Check whether this machine's memory, or one of its GPUs, could ever hold a model, from headers and before anything is
started.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...engine_config import EngineConfig
from ...errors import InvalidRequest
from ...host.child_check import run_child_check
from ...host.host_memory import total_memory

if TYPE_CHECKING:
    from ...capacity.device_fit import TargetDevice
    from ...parallel.planning.memory_plan import ParallelMemoryPlan

EXIT_TOO_LARGE = 3  # exit status
MAX_REPACK_GROWTH = 2  # most times that weights grow over their files: half precision that is computed in fp32
SMALL_MODEL_BYTES = 2**30  # bytes of weights that fit on every GPU, so that none is looked at
_FIELDS = (
    "device", "graphs", "dtype", "numerics", "kv_dtype", "cpu_weights", "max_batch_tokens", "max_running",
    "kv_memory_bytes", "swap_memory_bytes", "tensor_parallel", "pipeline_parallel", "pipeline_layers",
    "speculate_ngram",
)  # fmt: skip


def check_memory(folder: Path, config: EngineConfig) -> None:
    """Raise InvalidRequest if the model takes more than the machine has, or than any of its GPUs if it is for GPUs.

    Small models are not looked at closely. What else runs there, and how much is free right now, does not count: it may
    end.
    """
    if _file_bytes(folder) * MAX_REPACK_GROWTH <= (
        total_memory() if not config.device.startswith("cuda") else SMALL_MODEL_BYTES
    ):
        return
    given = json.dumps({name: getattr(config, name) for name in _FIELDS})
    what = f"whether there is memory for {folder}"
    message = run_child_check(__name__, [str(folder), given], refused=EXIT_TOO_LARGE, what=what)
    if message is not None:
        raise InvalidRequest(message, param="model")


def _file_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def machine_shortage(folder: Path, config: EngineConfig) -> str:
    """Return why the machine cannot hold the model; empty: it may."""
    from ...capacity.device_fit import FitWorkload, build_meta_decoder, memory_parts
    from ...loading.operator_choice import choose_operators
    from ...model.checkpoint_inspection import inspect_checkpoint
    from ...types import BLOCK_TOKENS

    checkpoint = inspect_checkpoint(folder)
    ops, _ = choose_operators(config, checkpoint.config.dtype)
    decoder = build_meta_decoder(checkpoint.config, checkpoint.format, checkpoint.tensors, ops)
    weights, there = memory_parts(decoder, FitWorkload(BLOCK_TOKENS, 1, 1, 1)).loaded, total_memory()
    if weights <= there:
        return ""
    return (
        f"model: its weights take {weights / 2**30:.1f} GiB on a CPU, and this machine has {there / 2**30:.1f} GiB; "
        f"`motley fit {folder}` tells what would hold it, and --weights-memory (weights_memory of a pool's engine) "
        "keeps on disk what does not fit"
    )


def gpu_shortage(folder: Path, config: EngineConfig) -> str:
    """Return why none of the GPUs here can hold the model, or its share of it; empty: one may, or another error comes
    first.
    """
    from ...capacity.device_fit import FitWorkload
    from ...model.checkpoint_inspection import inspect_checkpoint
    from ...parallel.planning.memory_plan import ParallelLayout, plan_parallel_memory
    from ...types import BLOCK_TOKENS

    checkpoint = inspect_checkpoint(folder)
    workload = FitWorkload(
        BLOCK_TOKENS, 1, config.max_batch_tokens, config.max_running, config.swap_memory_bytes, config.speculate_ngram
    )
    division = ParallelLayout(config.tensor_parallel, config.pipeline_parallel, config.pipeline_layers)
    found = [
        plan_parallel_memory(checkpoint, [place] * division.stages, workload, division) for place in local_gpus(config)
    ]
    if not found or any(one.refused or not _too_small(one, config) for one in found):
        return ""
    best = min(found, key=lambda one: one.missing)
    return f"model: {_describe_shortage(best)}; `motley fit {folder}` tells what would hold it, {_remedy(config)}"


def local_gpus(config: EngineConfig) -> list[TargetDevice]:
    """Return one GPU of each kind in this machine, as if nothing else used it."""
    import torch

    from ...capacity.device_fit import empty_local_gpu

    places = [
        empty_local_gpu(torch.device("cuda", index), config.kv_dtype) for index in range(torch.cuda.device_count())
    ]
    return list({(place.name, place.total): place for place in places}.values())


def _too_small(found: ParallelMemoryPlan, config: EngineConfig) -> bool:
    """Return whether the GPU is too small. Where settings fix the memory by hand, only the weights count."""
    if config.kv_memory_bytes is None and config.graphs:
        return not found.fits
    return any(process.parts.loaded > process.place.total for process in found.processes)


def _describe_shortage(found: ParallelMemoryPlan) -> str:
    process = max(found.processes, key=lambda process: process.parts.loaded)
    parts, place = process.parts, process.place
    share = f"its share of one of {found.division.processes} GPUs" if found.division.processes > 1 else "it"
    return (
        f"no GPU here can hold {share}: the weights take {parts.loaded / 2**30:.1f} GiB, what a step needs beside them "
        f"{(parts.activations + parts.graphs + parts.staging) / 2**30:.1f} GiB and one KV block, and {place.name} has "
        f"{place.total / 2**30:.1f} GiB"
    )


def _remedy(config: EngineConfig) -> str:
    more = "--tensor-parallel (tensor_parallel of a pool) divides it among more GPUs"
    if config.tensor_parallel * config.pipeline_parallel > 1:
        return f"and {more}"
    return f"{more}, and --weights-memory (weights_memory of its engine) keeps in the host's memory what does not fit"


def main() -> int:
    folder, given = sys.argv[1:]
    fields = json.loads(given)
    layers = fields["pipeline_layers"]
    config = EngineConfig(**{**fields, "pipeline_layers": None if layers is None else tuple(layers)})
    message = (machine_shortage if not config.device.startswith("cuda") else gpu_shortage)(Path(folder), config)
    if message:
        print(message)
    return EXIT_TOO_LARGE if message else 0


if __name__ == "__main__":
    sys.exit(main())
