"""Speed-up of Triton's interpreter, which skips needless work: half of its time on kernels like ours."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any


def speed_up_interpreter() -> None:
    """Patch the interpreter in a process under TRITON_INTERPRET=1; the results of kernels stay the same.

    For every sum and product of integers Triton computes once more, in 64 bits, whether they overflow, and then makes
    no use of it, since assertions are only for kernels in debug mode. And for each call of one function by another it
    walks all of `triton.language`, in which the launch has already replaced everything. Patching twice does no harm.
    """
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter.InterpretedFunction.__call__ = _call


def _call(function: Any, *given: Any, **named: Any) -> Any:
    """Call an interpreted function as Triton does, but skip the walk where there is nothing left to replace."""
    from triton.language import core
    from triton.runtime import interpreter

    if any(core.is_builtin(language.load) for language in _languages(function.fn)):
        interpreter._patch_lang(function.fn)
    try:
        return function.rewrite()(*given, **named)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


@cache
def _languages(function: FunctionType) -> list[Any]:
    """Return the modules whose builtins Triton replaces, among those that a function's globals contain."""
    from triton import language

    seen = {id(each) for each in function.__globals__.values()}
    return [module for module in (language, language.core) if id(module) in seen]
