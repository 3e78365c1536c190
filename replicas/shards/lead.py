"""The first process's model, as runners want one: what it is asked for all processes compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ...kernels.batch import StepBatch
from ..decoder import Decoder, Stream
from ..errors import EngineLost
from .group import Group

__all__ = ["Lead", "Line"]


class Lead:
    """Of tensor-parallel ranks alone: all make each call together. Raises EngineLost.

    version  of the weights that it has
    """

    def __init__(self, decoder: Decoder, group: Group, version: int = 0) -> None:
        self._decoder, self._group, self._version = decoder, group, version

    def renewed(self, decoder: Decoder, version: int) -> Lead:
        """With other weights."""
        return Lead(decoder, self._group, version)

    def forget(self) -> None:
        """Nothing is computed with it any more."""
        self._group.forget(self._version)

    def forward(self, batch: StepBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        return self._together("forward", batch, kv)

    def hidden(self, batch: StepBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        return self._together("hidden", batch, kv)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._together("logits", hidden)

    def _together(self, method: str, argument: StepBatch | torch.Tensor, *kv: Sequence[torch.Tensor]) -> torch.Tensor:
        began = time.monotonic()
        try:
            with self._group.waited_for():
                self._group.call(method, argument, self._version)
                found: torch.Tensor = getattr(self._decoder, method)(argument, *kv)
        except Exception as error:  # whatever it is: the others are in the middle of a step that never ends
            raise _lost(began, self._group.end(error)) from error
        return found


class Line:
    """Of pipeline stages: the first computes here, and the last answers. Raises EngineLost.

    version  of the weights that it has
    answers  of the last stage, whatever weights calls name; None: nothing has been called yet
    """

    def __init__(self, decoder: Decoder, group: Group, version: int = 0, answers: Answers | None = None) -> None:
        self._decoder, self._group, self._version = decoder, group, version
        self._answers = Answers(group) if answers is None else answers
        self.num_stages = len(group.stages)

    def renewed(self, decoder: Decoder, version: int) -> Line:
        """With other weights."""
        return Line(decoder, self._group, version, self._answers)

    def forget(self) -> None:
        """Nothing is computed with it any more."""
        self._group.forget(self._version)

    def forward(self, batch: StepBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        return self.begin("forward", batch, kv)()

    def hidden(self, batch: StepBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        return self.begin("hidden", batch, kv)()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._answers.to(lambda: self._group.call_last("logits", hidden, self._version))()

    def begin(self, method: str, batch: StepBatch, kv: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
        """`forward` or `hidden`: the first stage has computed when this returns. What it gives waits for the last."""

        def call() -> None:
            self._group.call(method, batch, self._version)
            self._group.hand_on(self._through(method, batch, kv))

        return self._answers.to(call)

    def _through(self, method: str, batch: StepBatch, kv: list[torch.Tensor]) -> Stream:
        """What the first stage hands on."""
        return self._decoder.through(batch, kv)


class Answers:
    """Of the last stage, which answers calls in their order, whoever asks first. Raises EngineLost."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._called = self._answered = 0
        self._found: dict[int, torch.Tensor] = {}  # by the number of the call

    def to(self, call: Callable[[], None]) -> Callable[[], torch.Tensor]:
        """Calls; what it returns waits for the answer."""
        began = time.monotonic()
        try:
            call()
        except Exception as error:  # whatever it is: the others are in the middle of a step that never ends
            raise self._lost(began, error) from error
        number = self._called
        self._called += 1
        return lambda: self._answer(number)

    def _answer(self, number: int) -> torch.Tensor:
        began = time.monotonic()
        try:
            while number not in self._found:
                self._found[self._answered] = self._group.answer()
                self._answered += 1
        except Exception as error:
            raise self._lost(began, error) from error
        return self._found.pop(number)

    def _lost(self, began: float, error: Exception) -> EngineLost:
        return _lost(began, self._group.end(error))


def _lost(began: float, error: Exception) -> EngineLost:
    """began: monotonic seconds, when it began to wait for others."""
    return EngineLost(f"the model is not whole any more, found after {time.monotonic() - began:.1f} s: {error}")
