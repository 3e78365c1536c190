"""Prints, as JSON, which kernels a launch would compile anew although they were compiled ahead.

For the capabilities given as CC, in a process without TRITON_INTERPRET. Nothing is compiled or computed: operators run
as they do on a GPU, on tensors without values, and Triton is asked for the key under which it would look in its cache,
by their launches with a driver that only knows its target, and by `aot.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from motley.kernels.compiler.aot import compiler_options, triton_source
from motley.kernels.device.precision import PrecisionPolicy, policy_of
from motley.kernels.launch.kernel_operation import KernelOperation, ProblemShape
from motley.kernels.launch.variant import Config, Variant
from motley.kernels.registry import OPERATIONS


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


REQUESTED: list[str] = []  # what the launches of one run want to have compiled, in order


def send(
    self: JITFunction[Any],
    key: str,
    signature: Any,
    device: int,
    constexprs: Any,
    options: Any,
    attrs: Any,
    warmup: bool,
) -> None:
    """In place of compiling; Triton launches nothing then."""
    REQUESTED.append(key_of(ASTSource(self, signature, constexprs, attrs), options))


def key_of(source: Any, options: Any) -> str:
    return f"{source.hash()} {options.hash()}"


def compiled_ahead(variant: Variant, capability: tuple[int, int]) -> str:
    backend = make_backend(GPUTarget("cuda", 10 * capability[0] + capability[1], 32))
    return key_of(triton_source(variant), backend.parse_options(compiler_options(variant)))


def tried(operation: KernelOperation, policy: PrecisionPolicy, shape: ProblemShape) -> list[Config]:
    """The default, and of each other way to launch a first: in one part or several, and whatever is swapped."""
    ways: dict[tuple[object, ...], Config] = {}
    for config in operation.configs(policy, shape):
        fields = config.to_json()
        parts = fields.get("SPLITS", fields.get("SPLIT", 1)) > 1
        ways.setdefault((parts, fields.get("SWAP"), fields.get("WIDE")), config)
    return list(ways.values())


def main(capabilities: Sequence[tuple[int, int]]) -> None:
    JITFunction._do_compile = send
    torch.Tensor.is_cuda = property(lambda self: True)
    FakeTensor.data_ptr = lambda self: self.storage_offset() * self.element_size()
    asked, others = 0, []
    for capability in capabilities:
        driver.set_active(Target(capability))
        policy = policy_of(*capability)
        for operation in OPERATIONS:
            if operation.refusal(policy):
                continue
            for shape in (*operation.samples(policy), *operation.small(policy)):
                zeros = shape.get("zeros", "no") == "yes"
                FakeTensor.any = lambda self, zeros=zeros: zeros  # asked of zero points alone
                with FakeTensorMode():
                    problem = operation.problem(policy, shape, torch.device("cpu"))
                    for config in tried(operation, policy, shape):
                        variants = [launch.variant for launch in operation.launches(policy, shape, config)]
                        REQUESTED.clear()
                        problem.run(config)
                        asked += len(REQUESTED)
                        if [compiled_ahead(variant, capability) for variant in variants] != REQUESTED:
                            names = ", ".join(variant.name for variant in variants)
                            others.append(f"{names} {capability} {shape.key} {config.to_json()}")
    json.dump({"asked": asked, "others": others}, sys.stdout)


if __name__ == "__main__":
    main([divmod(int(given), 10) for given in sys.argv[1:]])
