"""Models of the first process of a divided model, as runners use them: each call is computed by all processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ....kernels.batch import StepBatch
from ...errors import EngineLost
from ...model.decoder import Decoder, HiddenStream
from .follower_group import FollowerGroup


class TensorParallelLeader:
    """Model of tensor-parallel ranks without pipeline stages, which make each call together. Its calls raise
    EngineLost.

    version  version of its weights
    """

    def __init__(self, decoder: Decoder, group: FollowerGroup, version: int = 0) -> None:
        self._decoder, self._group, self._version = decoder, group, version

    def renewed(self, decoder: Decoder, version: int) -> TensorParallelLeader:
        """Return the same model with the weights of `version`, of which `decoder` has this rank's part."""
        return TensorParallelLeader(decoder, self._group, version)

    def forget(self) -> None:
        """Drop this version of the weights in the other processes; nothing is computed with it any more."""
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
            with self._group.waiting_for_followers():
                self._group.call(method, argument, self._version)
                found: torch.Tensor = getattr(self._decoder, method)(argument, *kv)
        except Exception as error:  # of any kind: the other processes are in the middle of a step that cannot end
            raise _peer_lost_error(began, self._group.end(error)) from error
        return found


class PipelineLeader:
    """Model of pipeline stages: the first computes in this process, and the last sends the result. Its calls raise
    EngineLost.

    version  version of its weights
    results  results of the last stage, shared by all versions; None if no call has been made yet
    """

    def __init__(
        self, decoder: Decoder, group: FollowerGroup, version: int = 0, results: LastStageAnswers | None = None
    ) -> None:
        self._decoder, self._group, self._version = decoder, group, version
        self._results = LastStageAnswers(group) if results is None else results
        self.num_stages = len(group.stages)

    def renewed(self, decoder: Decoder, version: int) -> PipelineLeader:
        """Return the same pipeline with the weights of `version`, of which `decoder` has the first stage's part."""
        return PipelineLeader(decoder, self._group, version, self._results)

    def forget(self) -> None:
        """Drop this version of the weights in the other processes; nothing is computed with it any more."""
        self._group.forget(self._version)

    def forward(self, batch: StepBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        return self.begin("forward", batch, kv)()

    def hidden(self, batch: StepBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        return self.begin("hidden", batch, kv)()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._results.to(lambda: self._group.call_last("logits", hidden, self._version))()

    def begin(self, method: str, batch: StepBatch, kv: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Begin a call of `forward` or `hidden`, and return a function that waits for the last stage's result.

        The first stage has computed its part when this returns.
        """

        def call() -> None:
            self._group.call(method, batch, self._version)
            self._group.hand_on(self._through(method, batch, kv))

        return self._results.to(call)

    def _through(self, method: str, batch: StepBatch, kv: list[torch.Tensor]) -> HiddenStream:
        """Compute the first pipeline stage's part of a step, and return what it hands on to the second."""
        return self._decoder.through(batch, kv)


class LastStageAnswers:
    """Results of the last stage, which sends them in the order of the calls; they may be asked for in any order. Raises
    EngineLost.
    """

    def __init__(self, group: FollowerGroup) -> None:
        self._group = group
        self._called = self._answered = 0
        self._found: dict[int, torch.Tensor] = {}  # by the number of the call

    def to(self, call: Callable[[], None]) -> Callable[[], torch.Tensor]:
        """Make a call of all pipeline stages, and return a function that waits for the last stage's result."""
        began = time.monotonic()
        try:
            call()
        except Exception as error:  # of any kind: the other processes are in the middle of a step that cannot end
            raise self._lost(began, error) from error
        number = self._called
        self._called += 1
        return lambda: self._receive(number)

    def _receive(self, number: int) -> torch.Tensor:
        began = time.monotonic()
        try:
            while number not in self._found:
                self._found[self._answered] = self._group.receive_result()
                self._answered += 1
        except Exception as error:
            raise self._lost(began, error) from error
        return self._found.pop(number)

    def _lost(self, began: float, error: Exception) -> EngineLost:
        return _peer_lost_error(began, self._group.end(error))


def _peer_lost_error(began: float, error: Exception) -> EngineLost:
    """Return the error for a lost process, with the seconds since `began`, when this process began to wait for the
    others.
    """
    return EngineLost(f"the processes of the model cannot go on, found after {time.monotonic() - began:.1f} s: {error}")
