"""Ahead-of-time compilation of kernels for any compute capability on a machine without a GPU.

It reports the resources of a kernel: registers, stack and shared memory are ptxas's own figures, read from the cubin;
instructions are counted in the PTX, since the disassembler that comes with Triton refuses the older cards.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..device.precision import triton_has
from ..launch.variant import Variant

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_INSTRUCTION = re.compile(r"(?:^|[;{])\s*(?:@!?%?\w+\s+)?([a-z][A-Za-z0-9_.:]*)\s", re.MULTILINE)
_TARGET = re.compile(r"\.target sm_\d+(a?)")
_NO_CODE = re.compile(r"^\s*\.(?:target|loc|file)\b.*$|//.*$", re.MULTILINE)
_LABEL = re.compile(r"^\s*(\$\w+):", re.MULTILINE)
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+);")
# Instructions with f16 in their name compute in half precision, except moves and conversions to and from other types.
_HALF = re.compile(r"(?!(?:cvt|mov|ld|st)\.).*\.b?f16(?:x2)?(?:\.|$)|cvt\..*\.b?f16(?:x2)?\.b?f16(?:x2)?$")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """Kernel that was compiled for one compute capability.

    capability  such as (6, 1)
    registers   per thread
    spilled     bytes per thread of registers that are spilled to memory
    shared      bytes of shared memory per block, without the driver's own
    threads     per block
    seconds     that compiling took
    cached      whether it came from Triton's cache
    """

    name: str
    capability: tuple[int, int]
    registers: int
    spilled: int
    shared: int
    threads: int
    seconds: float
    ptx: str
    cached: bool = False

    def same_ptx(self, other: CompiledKernel) -> bool:
        """Return whether two kernels have the same PTX.

        Their targets are ignored, and the paths of their sources, which a cache may have from another checkout.
        """
        return _strip_ptx(self.ptx) == _strip_ptx(other.ptx)

    def mix(self) -> Counter[str]:
        """Count the PTX instructions by full name, as often as they appear in the text."""
        return Counter(_INSTRUCTION.findall(self.ptx))

    def inner_loops(self) -> tuple[Counter[str], ...]:
        """Count the PTX instructions of each loop that contains no other loop, by full name, the largest loop first.

        A loop is the text between a label and the last branch back to it.
        """
        labels = {found[1]: found.start() for found in _LABEL.finditer(self.ptx)}
        ends: dict[int, int] = {}
        for branch in _BRANCH.finditer(self.ptx):
            start = labels[branch[1]]
            if start < branch.start():
                ends[start] = max(ends.get(start, 0), branch.end())
        bodies = [self.ptx[start:end] for start, end in ends.items() if not any(start < other < end for other in ends)]
        counted = (Counter(_INSTRUCTION.findall(body)) for body in bodies)
        return tuple(sorted(counted, key=Counter.total, reverse=True))

    def inner_loop(self) -> Counter[str]:
        """Count the PTX instructions of the largest inner loop; empty without a loop."""
        return next(iter(self.inner_loops()), Counter())

    def half_arithmetic(self) -> Counter[str]:
        """Count the half-precision arithmetic instructions, which run at a 64th of the fp32 rate on 6.1."""
        mix = self.mix()
        return Counter({name: count for name, count in mix.items() if _HALF.match(name)})


def compile_variant(variant: Variant, capability: tuple[int, int]) -> CompiledKernel:
    """Compile a variant for a compute capability.

    Raises whatever Triton or ptxas raises. It must not run in a process under TRITON_INTERPRET.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    hits: list[bool] = []
    began = time.perf_counter()
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
        kernel: Any = triton.compile(triton_source(variant), target=target, options=compiler_options(variant))
    seconds = time.perf_counter() - began
    registers, stack, _, local = _usage(kernel.asm["cubin"])
    return CompiledKernel(
        variant.name,
        capability,
        registers,
        stack + local,
        kernel.metadata.shared,
        32 * kernel.metadata.num_warps,
        seconds,
        kernel.asm["ptx"],
        all(hits),
    )


def assemble_ptx(compiled: CompiledKernel, variant: Variant, capability: tuple[int, int]) -> CompiledKernel:
    """Assemble a kernel that was compiled for one member of a PTX family for another member: the same PTX, other
    target.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    number = 10 * capability[0] + capability[1]
    backend: Any = make_backend(GPUTarget("cuda", number, 32))
    options = backend.parse_options(compiler_options(variant))
    began = time.perf_counter()
    ptx = _TARGET.sub(rf".target sm_{number}\1", compiled.ptx)
    registers, stack, _, local = _usage(backend.make_cubin(ptx, {}, options, number))
    seconds = time.perf_counter() - began
    return replace(
        compiled, capability=capability, registers=registers, spilled=stack + local, seconds=seconds, ptx=ptx
    )


def triton_source(variant: Variant) -> Any:
    """Return the source object that Triton compiles.

    It is the same as for a launch, so that either finds in the cache what the other compiled.
    """
    from triton.compiler import ASTSource

    return ASTSource(
        fn=variant.function, signature=_signature(variant), constexprs=variant.all_constants, attrs=_attributes(variant)
    )


def compiler_options(variant: Variant) -> dict[str, Any]:
    return variant.options


def _strip_ptx(ptx: str) -> str:
    return _NO_CODE.sub("", ptx.partition("\t.section")[0])


def _signature(variant: Variant) -> dict[str, str]:
    types = dict(variant.types)
    return {name: types.get(name, "constexpr") for name in variant.function.arg_names}


def _attributes(variant: Variant) -> dict[tuple[int, ...], list[list[Any]]]:
    """Return the attributes of the arguments in the form and order in which a launch has them."""
    found: dict[tuple[int, ...], list[list[Any]]] = {}
    types, newer = dict(variant.types), triton_has((3, 7))
    for index, name in enumerate(variant.function.arg_names):
        if name in variant.aligned:
            found[index,] = [["tt.divisibility", 16]]
        elif name in types:
            integer = types[name].startswith("i") and not variant.function.params[index].do_not_specialize
            if types[name].startswith("*") or integer:
                found[index,] = []
        else:
            constant = variant.all_constants.get(name)
            if newer or isinstance(constant, str):
                found[index,] = []
            elif isinstance(constant, tuple):
                found |= {(index, part): [] for part in range(len(constant))}
    return found


def _usage(cubin: bytes) -> tuple[int, int, int, int]:
    """Return the registers of a cubin, and its bytes of stack, static shared and local memory."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = _USAGE.search(said.stdout + said.stderr)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resources of the kernel: {said.stdout[:200]}{said.stderr[:200]}")
    registers, stack, shared, local = map(int, found.groups())
    return registers, stack, shared, local
