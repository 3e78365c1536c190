"""Check whether this machine's memory, or one of its GPUs, could ever hold a model, from headers and before anything is
started.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .engine_config import EngineConfig
from .errors import InvalidRequest
from .host_memory import total_memory

if TYPE_CHECKING:
    from .fit import Place
    from .shards.rooms import Divided

__all__ = ["check_memory"]

BAD = 3  # exit status
GROWTH = 2  # most times that weights grow over their files: half precision that is computed in fp32
SMALL = 2**30  # bytes of weights that fit on every GPU, so that none is looked at
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
    if _file_bytes(folder) * GROWTH <= (total_memory() if not config.device.startswith("cuda") else SMALL):
        return
    given = json.dumps({name: getattr(config, name) for name in _FIELDS})
    command = [sys.executable, "-m", __name__, str(folder), given]  # its imports are not to stay in this process
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode == BAD:
        raise InvalidRequest(ended.stdout.strip(), param="model")


def _file_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def too_large(folder: Path, config: EngineConfig) -> str:
    """Return why the machine cannot hold the model; empty: it may."""
    from .build import operators
    from .checkpoint import inspect_checkpoint
    from .fit import Asked, outlined, parts_of
    from .protocol import BLOCK_TOKENS

    checkpoint = inspect_checkpoint(folder)
    ops, _ = operators(config, checkpoint.config.dtype)
    decoder = outlined(checkpoint.config, checkpoint.format, checkpoint.tensors, ops)
    weights, there = parts_of(decoder, Asked(BLOCK_TOKENS, 1, 1, 1)).loaded, total_memory()
    if weights <= there:
        return ""
    return (
        f"model: its weights take {weights / 2**30:.1f} GiB on a CPU, and this machine has {there / 2**30:.1f} GiB; "
        f"`motley fit {folder}` tells what would hold it, and --weights-memory (weights_memory of a pool's engine) "
        "keeps on disk what does not fit"
    )


def too_large_for_gpus(folder: Path, config: EngineConfig) -> str:
    """Return why none of the GPUs here can hold the model, or its share of it; empty: one may, or another error comes
    first.
    """
    from .checkpoint import inspect_checkpoint
    from .fit import Asked
    from .protocol import BLOCK_TOKENS
    from .shards.rooms import Division, divided

    checkpoint = inspect_checkpoint(folder)
    asked = Asked(
        BLOCK_TOKENS, 1, config.max_batch_tokens, config.max_running, config.swap_memory_bytes, config.speculate_ngram
    )
    division = Division(config.tensor_parallel, config.pipeline_parallel, config.pipeline_layers)
    found = [divided(checkpoint, [place] * division.stages, asked, division) for place in gpus_here(config)]
    if not found or any(one.refused or not _too_small(one, config) for one in found):
        return ""
    best = min(found, key=lambda one: one.missing)
    return f"model: {_missing(best)}; `motley fit {folder}` tells what would hold it, {_remedy(config)}"


def gpus_here(config: EngineConfig) -> list[Place]:
    """Return one GPU of each kind in this machine, as if nothing else used it."""
    import torch

    from .fit import alone

    places = [alone(torch.device("cuda", index), config.kv_dtype) for index in range(torch.cuda.device_count())]
    return list({(place.name, place.total): place for place in places}.values())


def _too_small(found: Divided, config: EngineConfig) -> bool:
    """Return whether the GPU is too small. Where settings fix the memory by hand, only the weights count."""
    if config.kv_memory_bytes is None and config.graphs:
        return not found.fits
    return any(process.parts.loaded > process.place.total for process in found.processes)


def _missing(found: Divided) -> str:
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
    message = (too_large if not config.device.startswith("cuda") else too_large_for_gpus)(Path(folder), config)
    if message:
        print(message)
    return BAD if message else 0


if __name__ == "__main__":
    sys.exit(main())
