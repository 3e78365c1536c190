"""Launches of kernels that Triton compiles for 9.0, on a driver that launches nothing: which kernel is it each time?

Prints JSON: for each launch the kernel that Triton itself takes for such arguments, the one that a variant launches,
and whether the variant has asked Triton.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from motley.kernels.launch.variant import Config, Variant


class Utils:
    """Kernels are known by their machine code."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}

    def load_binary(self, name: str, code: bytes, *_: Any) -> tuple[int, int, int, int, int]:
        return 1, hash(code), 32, 0, 1024

    def unload_module(self, *_: Any) -> None: ...


launched: list[int] = []


class Launcher:
    def __init__(self, *_: Any) -> None: ...

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *arguments: Any) -> None:
        assert (x, y, z) == (4, 1, 1)
        launched.append(function)


class Driver:
    launcher_cls, utils = Launcher, Utils()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


@triton.jit(do_not_specialize=("count",), do_not_specialize_on_alignment=("anywhere",))
def _add(x, anywhere, out, stride, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < count, 0.0) + tl.load(anywhere + at, at < count, 0.0), at < count)


def main() -> None:
    driver.set_active(Driver())
    types = {"x": "*fp32", "anywhere": "*fp32", "out": "*fp32", "stride": "i32", "count": "i32"}
    variant = Variant("add", _add, tuple(types.items()), (), Config.of(4, 1, BLOCK=1024))
    memory = torch.zeros(4096)  # wide enough for loads of 16 bytes a thread
    aligned, odd = memory[:2048], memory[1:2049]
    assert not aligned.data_ptr() % 16
    asked: list[bool] = []
    run = _add.run

    def counted(*arguments: Any, **options: Any) -> Any:
        asked[-1] = True
        return run(*arguments, **options)

    _add.run = counted
    reported = []
    for x in (aligned, odd):
        for anywhere in (aligned, odd):
            for stride in (16, 32, 17, 1, 16):
                for count in (1, 16, 17):
                    asked.append(False)
                    variant.launch((4,), x, anywhere, aligned, stride, count)
                    mine, whether = launched.pop(), asked[-1]
                    _add[(4,)](x, anywhere, aligned, stride, count, **variant.all_constants, **variant.options)
                    reported.append({"own": mine, "triton": launched.pop(), "asked": whether})
    print(json.dumps(reported))


if __name__ == "__main__":
    main()
