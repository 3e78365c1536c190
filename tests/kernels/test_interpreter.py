"""The interpreter that the tests compute kernels by, beside Triton's as it comes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from motley.kernels.compiler.triton_interpreter import speed_up_interpreter


@triton.jit
def _scaled(values, factor):  # type: ignore[no-untyped-def]
    return values * factor + tl.cdiv(7, 2)


@triton.jit
def _kernel(source, target, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + at, at < size, 0)
    most = tl.max(tl.where(at < size, values, 0), 0)
    tl.store(target + at, _scaled(values, 3) - most, at < size)


SOURCE = torch.tensor([1, -5, 2**31 - 1, -(2**31), 7, 2**30], dtype=torch.int32)


def computed() -> torch.Tensor:
    target = torch.zeros_like(SOURCE)
    _kernel[(2,)](SOURCE, target, SOURCE.numel(), BLOCK=4)
    return target


def test_it_computes_what_tritons_own_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that call functions, ours and Triton's; and sums that overflow go round."""
    quickened = interpreter.InterpretedFunction.__call__
    builder = interpreter.interpreter_builder

    def its_own(function, *given, **named):  # type: ignore[no-untyped-def]
        interpreter._patch_lang(function.fn)
        return function.rewrite()(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", its_own)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=True))
        expected = computed()
    assert interpreter.InterpretedFunction.__call__ is quickened
    assert torch.equal(computed(), expected)
    most = torch.tensor([2**31 - 1] * 4 + [2**30] * 2)
    assert torch.equal(expected, (3 * SOURCE.long() + 4 - most).int())


def test_kernels_in_debug_mode_still_assert(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, debug=True, sanitize_overflow=True))
    speed_up_interpreter()
    with pytest.raises(interpreter.InterpreterError, match="overflow"):
        computed()
