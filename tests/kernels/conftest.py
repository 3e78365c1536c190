"""Fixtures of several tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter

from motley.kernels.launch import config_tables


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Tables of configs of its own, none to begin with; what was read of them is forgotten afterwards."""
    monkeypatch.setattr(config_tables, "TUNED_FOLDER", tmp_path)
    monkeypatch.delenv(config_tables.TUNED_VARIABLE, raising=False)
    config_tables.clear_table_cache()
    yield tmp_path
    config_tables.clear_table_cache()


@pytest.fixture
def bf16_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dots of bf16 in the interpreter, which has its bits as whole numbers and multiplies those.

    Operands are made fp32 at once, in which a product of two bf16 is exact, as in a tensor core.
    """
    builder = interpreter.InterpreterBuilder
    dot, to_float = builder.create_dot, builder.create_si_to_fp

    def widened(self: Any, operand: Any) -> Any:
        return self.cast_impl(operand, tl.float32) if operand.dtype.scalar == tl.bfloat16 else operand

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(self, widened(self, a), widened(self, b), *others)

    def create_si_to_fp(self: Any, source: Any, kind: Any) -> Any:
        if kind.scalar == tl.bfloat16:
            source = to_float(self, source, tl.float32)
        return self.cast_impl(source, kind)

    monkeypatch.setattr(builder, "create_dot", create_dot)
    monkeypatch.setattr(builder, "create_si_to_fp", create_si_to_fp)


@pytest.fixture
def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's dot by sums in the order of K, as a card has it for all rows of a tile.

    It calls the BLAS, which on some CPUs adds up the last rows of a matrix in another order.
    """

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        number = d.data.dtype
        products = a.data.astype(number)[:, :, None] * b.data.astype(number)[None]
        return interpreter.TensorHandle(products.sum(1, dtype=number) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
