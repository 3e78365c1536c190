"""Process of `motley bench gpu --part divided`: `python -m …gpu_divided_tasks FOLDER [cpu]`.

It runs one model three times: whole on the GPU, divided as one of `WAYS`, and whole on a CPU in fp32; each before and
after an update of the weights. Where several processes hold KV, it also moves some KV to the host and back. With the
argument cpu it is a rehearsal, in which every process is on a CPU.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from motley.kernels.ops import Ops
from motley.replicas.capacity.device_fit import build_meta_decoder
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import EngineFault
from motley.replicas.execution.swapper import pinned_bytes
from motley.replicas.loading.operator_choice import choose_operators
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.offload.planning.device_plan import DevicePlan
from motley.replicas.offload.planning.weight_budget import weight_sizes

from ..checkpoints.random_checkpoint import FORMATS, CheckpointShape
from ..processes.bench_child import respond
from ..processes.task_process import serve
from .gpu_divided_checks import (
    PROMPT,
    FixedDeviceLauncher,
    nccl_responds,
    nccl_version,
    swap_there_and_back,
    write_another,
)
from .gpu_divided_part import WAYS, ParallelCase
from .gpu_engine_check import NOISE, beside, outputs, texts

SHAPE = CheckpointShape(512, 1536, 4, 8, 4, 4096)
NEW = ("embed_tokens", "layers.0.", "layers.3.")  # tensors that an update changes: some of every process
_KV_BYTES = 2**24
_KV_APART = 0.1  # allowed relative difference of ranks' KV, which is rounded differently; unrelated KV is 1.4 apart
_HOST_BYTES = 2**33  # more than the layers take
# First version of NCCL that can let ranks share a GPU: their output is right, but their speed means nothing.
SHARING_NCCL = (2, 30)


class DividedTasks:
    """Tasks of the process: each public method is one, and its arguments and result are JSON.

    folder  folder for checkpoints, shared by all processes
    """

    def __init__(self, folder: Path, *, real: bool) -> None:
        self._folder, self._real = folder, real

    def write(self) -> None:
        """Write the checkpoints, files of new weights for them, and the checkpoints that have the new weights."""
        for format, write in FORMATS.items():
            base = self._folder / format
            write(SHAPE, base / "old")
            write(SHAPE, base / "new")
            weights = load_file(base / "old" / "model.safetensors")
            seed = torch.Generator().manual_seed(1)
            new = {
                name: write_another(tensor, seed)
                for name, tensor in weights.items()
                if any(part in name for part in NEW)
            }
            save_file(new, base / "update.safetensors")
            save_file({**weights, **new}, base / "new" / "model.safetensors", metadata={"format": "pt"})

    def said(self, way: str, format: str, max_tokens: int, within_s: float) -> dict[str, Any]:
        """Compare the outputs of a divided model with those of the whole one; return the differences and whether they
        are right.

        within_s  seconds after which a stack trace is written to stderr, to show where a hanging process is

        Returns {"skipped": reason} if this machine cannot divide the model this way.
        """
        held = WAYS[way]
        if why := self._lacking(held):
            return {"skipped": why}
        base = self._folder / format
        found: dict[str, Any] = {}
        with ExitStack() as stack:
            faulthandler.dump_traceback_later(max(1.0, within_s))
            stack.callback(faulthandler.cancel_dump_traceback_later)
            engine = stack.enter_context(self._divided(base / "old", held))
            choices = engine.choices
            named = ("weights", "stages", "ranks", "graphs")
            found["choices"] = {name: choices[name] for name in named if name in choices}
            for version in ("old", "new"):
                if version == "new":
                    engine.update_weights(base / "update.safetensors")
                found[version] = self._compared(engine, base / version, held, max_tokens)
        differs = found["old"].pop("logits").equal(found["new"].pop("logits"))
        parts = [found["old"], found["new"]]
        if held.copies:
            parts.append(found.setdefault("copied", self._copied(base / "old", held)))
        return {**found, "right": all(part["right"] for part in parts) and not differs}

    def usable(self) -> bool:
        return not self._real or nccl_responds()

    def _compared(self, engine: Engine, folder: Path, way: ParallelCase, max_tokens: int) -> dict[str, Any]:
        found, whole = self._beside_exact(engine, folder, max_tokens), self._whole(folder)
        as_whole = texts(engine, max_tokens) == texts(whole, max_tokens)
        logits, of_whole = engine.logits(PROMPT), whole.logits(PROMPT)
        return {
            **found,
            "texts_as_whole": as_whole,
            "largest_logit_difference_to_whole": (logits - of_whole).abs().max().item(),
            "right": found["right"] and (as_whole or not way.alike),
            "logits": logits,
        }

    @staticmethod
    def _beside_exact(engine: Engine, folder: Path, max_tokens: int) -> dict[str, Any]:
        """Compare the engine with a CPU in fp32: it is right if it is as near to that as rounding allows."""
        exact = Engine(folder, dtype="float32", threads=1)
        rough = Engine(folder, dtype="bfloat16", threads=1)
        expected = outputs(exact, max_tokens)
        allowed = (
            NOISE["fp16" if engine.model.dtype == "float16" else "bf16"]
            * beside(outputs(rough, max_tokens), expected).apart
        )
        ours = beside(outputs(engine, max_tokens), expected)
        return {
            "equal_to_fp32": ours.equal,
            "largest_difference": ours.apart,
            "allowed_difference": allowed,
            "gap_where_texts_part": ours.closest,
            "right": ours.apart <= allowed and ours.closest <= 2 * allowed,
        }

    def _copied(self, folder: Path, way: ParallelCase) -> dict[str, Any]:
        """Compare the KV of a prompt after it went to the host in parts, came back into other blocks, and went to the
        host again.
        """
        options = {"swap_memory_bytes": _KV_BYTES}
        with self._divided(folder, way, **options) as engine, self._whole(folder, **options) as whole:
            (first, second), (of_whole, _) = swap_there_and_back(engine), swap_there_and_back(whole)
        apart = ((first - of_whole).square().mean() / of_whole.square().mean()).sqrt().item()
        return {
            "same_twice": first.equal(second),
            "apart_from_whole": apart,
            "right": first.equal(second) and apart <= (0 if way.alike else _KV_APART),
        }

    def _divided(self, folder: Path, way: ParallelCase, **more: Any) -> Engine:
        settings: dict[str, Any] = {"kv_memory_bytes": _KV_BYTES, **way.settings, **more}
        if way.tiers is not None:
            settings |= self._budgets(folder, way.tiers)
        launcher = FixedDeviceLauncher([self._device(kind, number, way) for number, kind in enumerate(way.devices)])
        device = ",".join(launcher.devices[:: way.ranks])
        return Engine(folder, device=device, launcher=launcher, threads=2, **settings)

    def _whole(self, folder: Path, **more: Any) -> Engine:
        return Engine(folder, device="cuda:0" if self._real else "cpu", kv_memory_bytes=_KV_BYTES, threads=2, **more)

    def _device(self, kind: str, number: int, way: ParallelCase) -> str:
        """Return the device of one process of a divided model. Ranks have a GPU each if there are enough GPUs."""
        if kind == "cpu" or not self._real:
            return "cpu"
        enough = torch.cuda.device_count() >= len(way.devices)
        return f"cuda:{number}" if enough else "cuda:0"

    def _lacking(self, way: ParallelCase) -> str:
        if not self._real or way.ranks == 1 or torch.cuda.device_count() >= len(way.devices):
            return ""
        version = nccl_version()
        if version < SHARING_NCCL:
            return f"NCCL {'.'.join(map(str, version))} refuses ranks that share a GPU, and there are too few GPUs"
        return ""

    def _budgets(self, folder: Path, tiers: str) -> dict[str, int]:
        found = inspect_checkpoint(folder)
        config = EngineConfig(device="cuda:0" if self._real else "cpu")
        ops: Ops = choose_operators(config, found.config.dtype)[0]
        outlining: Callable[[], Ops] = getattr(ops, "for_meta_device", lambda: ops)
        sizes = weight_sizes(build_meta_decoder(found.config, found.format, found.tensors, outlining()))
        every = DevicePlan.all_on("disk", sizes)
        device = every.device_bytes + max(sizes.layers) * (tiers == "both")
        if not self._real:  # a CPU has one tier beside its memory
            return {"weights_memory_bytes": device + max(sizes.layers)}
        host = {"host": _HOST_BYTES, "disk": every.host_bytes}.get(tiers, 0)
        host = host or every.host_bytes + pinned_bytes(2 * max(sizes.layers), 1)
        return {"weights_memory_bytes": device, "weights_host_memory_bytes": host}


def main(folder: Path, *, real: bool) -> None:
    if real and not torch.cuda.is_available():
        raise EngineFault("torch finds no GPU here")
    # Lets ranks share a GPU; NCCL reads this when they join.
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    respond({"ready": True})
    serve(DividedTasks(folder, real=real))


if __name__ == "__main__":
    main(Path(sys.argv[1]), real="cpu" not in sys.argv[2:])
