"""Process of one side of `motley bench engine --device cuda`, which has the GPU to itself.

    python -m motley_bench.sides.gpu_side_process SIDE SHAPE DEVICE [DRAFTS]

SIDE is motley or transformers; transformers takes no DRAFTS. With DEVICE "cpu" it rehearses: it takes the same steps,
but its figures mean nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch

from ..processes.bench_child import respond
from ..processes.task_process import TaskHandler, serve

SIDES = {"motley": "side_worker", "transformers": "side_static"}


class DeviceSide:
    """Base class of the sides on a device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def usable(self) -> bool:
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError:
                return False
        return True


def main() -> None:
    side, shape, device, *drafts = sys.argv[1:]
    module = import_module(f".{SIDES[side]}", __package__)
    tasks: Any = module.build(shape, device, *map(int, drafts))
    run(tasks)


def run(tasks: Any) -> None:
    respond({"ready": True, **tasks.describe()})
    ready: TaskHandler = tasks
    serve(ready)


if __name__ == "__main__":
    main()
