"""Outlines of the checkpoints that are named, on operators of every kind, where torch's compiler cannot be imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from motley.kernels.cpu.c_kernels.native_kernels import load_native_kernels
from motley.kernels.cpu.cpu_ops import CpuOps
from motley.kernels.device.device_context import interpreter_context
from motley.kernels.gpu.gpu_ops import GpuOps
from motley.replicas.capacity.device_fit import build_meta_decoder
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint

CAPABILITIES = ((6, 1), (7, 5), (8, 0), (9, 0))


class NoCompiler:
    def find_spec(self, name: str, *_: Any) -> None:
        if name == "torch._dynamo":
            raise ImportError(name)


def _on(capability: tuple[int, int]) -> GpuOps:
    return GpuOps(replace(interpreter_context(capability), device=torch.device("meta")))


def main(*folders: str) -> None:
    kinds: list[Callable[[], Any]] = [partial(_on, capability) for capability in CAPABILITIES]
    for native in (load_native_kernels()[0], None):
        for dtype, weights in ((torch.bfloat16, None), (torch.float32, "dense"), (torch.bfloat16, "int8")):
            kinds.append(partial(CpuOps, dtype, "fast", weights, native, ""))
    assert "torch._dynamo" not in sys.modules
    sys.meta_path.insert(0, NoCompiler())
    for folder in folders:
        found = inspect_checkpoint(Path(folder))
        for kind in kinds:
            build_meta_decoder(found.config, found.format, found.tensors, kind())


if __name__ == "__main__":
    main(*sys.argv[1:])
