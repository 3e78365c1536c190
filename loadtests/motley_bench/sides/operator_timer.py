"""Timing of a decoder's operators: how much of a step each of them takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from motley.replicas.model.decoder import Decoder

_OPS = ("rms_norm", "add_rms_norm", "silu_mul", "rotary_write", "attention")


class OperatorTimer(ExitStack):
    """Context manager within which each operator of a decoder adds the seconds that it takes to `spent`, by its
    name.
    """

    def __init__(self, decoder: Decoder, spent: dict[str, float]) -> None:
        super().__init__()
        self._decoder, self._spent = decoder, spent

    def __enter__(self) -> OperatorTimer:
        super().__enter__()
        for name in _OPS:
            self._replace(self._decoder.ops, name, name)
        for layer in self._decoder.layers:
            self._replace(layer.attention, "qkv", "qkv projection")
            self._replace(layer.attention, "o", "output projection")
            self._replace(layer.mlp, "gate_up", "gate and up projection")
            self._replace(layer.mlp, "down", "down projection")
        self._replace(self._decoder, "head", "head")
        return self

    def _replace(self, owner: object, name: str, label: str) -> None:
        self.enter_context(patch.object(owner, name, _clocked(getattr(owner, name), self._spent, label)))


def _clocked(function: Callable[..., Any], spent: dict[str, float], label: str) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        result = function(*args)
        spent[label] += time.perf_counter() - began
        return result

    return timed
