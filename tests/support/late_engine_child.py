"""A side of `motley bench engine --device cuda`, ours on the stand-in for a device: graphs, staging and overlap run."""

from __future__ import annotations

import sys

from late_device import LateDevice, LateOps

from motley.kernels.device.device_context import DeviceContext, interpreter_context
from motley_bench.sides import side_static
from motley_bench.sides.gpu_side_process import run
from motley_bench.sides.side_worker import WorkerSide

__all__ = ["late_streams"]


class GpuLikeOps(LateOps):
    """Operators with the figures of a GPU, of which a roofline is computed."""

    device_context: DeviceContext = interpreter_context((9, 0))


def late_streams(drafts: int = 0) -> WorkerSide:
    return WorkerSide("rehearsal", "cpu", drafts, GpuLikeOps(), LateDevice())


if __name__ == "__main__":
    side, shape, device, *drafts = sys.argv[1:]
    run(late_streams(*map(int, drafts)) if side == "motley" else side_static.build(shape, device))
