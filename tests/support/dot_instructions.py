"""Prints, for each capability and number of rows given as CC:ROWS, what Triton makes of a dot of halves.

A process of its own: Triton compiles nothing where its interpreter has been.
"""

import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SIGNATURE = {"a": "*fp16", "b": "*fp16", "c": "*fp32", "ROWS": "constexpr", "SIZE": "constexpr"}


@triton.jit
def dot(a, b, c, ROWS: tl.constexpr, SIZE: tl.constexpr):
    row, inner, column = tl.arange(0, ROWS), tl.arange(0, SIZE), tl.arange(0, SIZE)
    x = tl.load(a + row[:, None] * SIZE + inner[None, :])
    y = tl.load(b + inner[:, None] * SIZE + column[None, :])
    tl.store(c + row[:, None] * SIZE + column[None, :], tl.dot(x, y))


if __name__ == "__main__":
    for requested in sys.argv[1:]:
        capability, rows = map(int, requested.split(":"))
        source = ASTSource(dot, SIGNATURE, {"ROWS": rows, "SIZE": 64})
        ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
        print(requested, *sorted(set(re.findall(r"fma\.rn\.f\w+|\bmma\.sync|wgmma(?=\.mma)|tcgen05(?=\.mma)", ptx))))
