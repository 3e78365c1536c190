"""Prints, as JSON, which kernels a launch would compile anew although they were compiled ahead.

In a process without TRITON_INTERPRET. Nothing is compiled or run: Triton is asked for the key under which it would
look in its cache, by a launch with a driver that only knows its target, and by `aot.py`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from motley.kernels.aot import options_of, source_of
from motley.kernels.capability import CAPABILITIES
from motley.kernels.precision import policy_of
from motley.kernels.registry import OPERATIONS
from motley.kernels.variant import Variant

TORCH = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "i8": torch.int8, "u8": torch.uint8,
    "i32": torch.int32, "i64": torch.int64, "fp8e4nv": torch.float8_e4m3fn, "u32": torch.uint32, "i1": torch.bool,
}  # fmt: skip


class Target:
    """A driver without a device."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch  # what was asked for one target is no answer for the next

    def get_current_stream(self, device: object = None) -> int:
        return 0


class Asked(Exception):
    """What a launch wants to have compiled."""


def ask(
    self: JITFunction[Any],
    key: str,
    signature: Any,
    device: int,
    constexprs: Any,
    options: Any,
    attrs: Any,
    warmup: bool,
) -> None:
    raise Asked(f"{ASTSource(self, signature, constexprs, attrs).hash()} {options.hash()}")


def of_launch(variant: Variant) -> str:
    arguments: list[Any] = []
    for name, kind in variant.types:
        if kind.startswith("*"):
            arguments.append(torch.empty(64, dtype=TORCH[kind[1:]]))
        elif kind.startswith("fp"):
            arguments.append(1.0)
        else:
            arguments.append(32 if name in variant.aligned else 1)  # 1: what Triton likes best to make a constant
    try:
        variant.launch((1,), *arguments)
    except Asked as asked:
        return str(asked)
    raise AssertionError("the launch asked for nothing")


def compiled_ahead(variant: Variant, capability: tuple[int, int]) -> str:
    backend = make_backend(GPUTarget("cuda", 10 * capability[0] + capability[1], 32))
    return f"{source_of(variant).hash()} {backend.parse_options(options_of(variant)).hash()}"


def main() -> None:
    JITFunction._do_compile = ask
    asked, others = 0, []
    for capability in CAPABILITIES:
        driver.set_active(Target(capability))
        policy = policy_of(*capability)
        for operation in OPERATIONS:
            if operation.refusal(policy):
                continue
            for shape in operation.samples(policy):
                for launch in operation.launches(policy, shape, operation.configs(policy, shape)[0]):
                    asked += 1
                    if of_launch(launch.variant) != compiled_ahead(launch.variant, capability):
                        others.append(f"{launch.variant.name} {capability} {shape.key}")
    json.dump({"asked": asked, "others": others}, sys.stdout)


if __name__ == "__main__":
    main()
