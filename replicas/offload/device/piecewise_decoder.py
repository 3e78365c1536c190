"""Decoder on a GPU with offloaded layers, whose steps are submitted in parts, each after the copy of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from ....kernels.batch import StepBatch
from ...execution.runner import ForwardModel
from ...gpu.accelerator import Accelerator
from ...model.decoder import Decoder, HiddenStream
from ...model.layers import Layer
from ...model.parts.layer_source import CosSin
from .device_tier import DeviceTier, OffloadedLayer

__all__ = ["PiecewiseDecoder", "PiecewiseStep", "piecewise_model"]


class PiecewiseDecoder:
    """Model with offloaded layers, as a GPU's runner uses it. Implements `PiecewiseModel`, `RenewableModel` and
    `ReleasableModel`.
    """

    def __init__(self, decoder: Decoder, accelerator: Accelerator) -> None:
        self.decoder, self._accelerator = decoder, accelerator
        self._runs = list(_layer_runs(decoder.layers))

    def submit(
        self, batch: Callable[[], StepBatch], kv: list[torch.Tensor], end: Callable[[StepBatch, ForwardModel], None]
    ) -> None:
        """Submit a step without waiting for the device (`PiecewiseModel`): `batch`, runs of layers that stay there,
        each offloaded layer after its copy, then `end`. May wait for a disk. Raises EngineFault if a layer cannot be
        read.
        """
        tier = self.decoder.tier
        assert isinstance(tier, DeviceTier)
        assert tier.feed is not None
        submit, step = self._accelerator.submit, PiecewiseStep(self.decoder, kv)
        submit(lambda: step.begin(batch()))
        for first, last in self._runs:
            layer = self.decoder.layers[first]
            if not isinstance(layer, OffloadedLayer):
                submit(partial(step.through, first, self.decoder.layers[first:last]))
                continue
            buffer = tier.feed.bring(layer.index)
            try:
                submit(partial(step.through, first, [layer.twins[buffer]]))
            finally:
                tier.feed.release(buffer)
        submit(lambda: end(step.batch, step))

    def renewed(self, decoder: Decoder, version: int) -> PiecewiseDecoder:
        """Return the same model with other weights, whose `decoder` has buffers and copies of its own."""
        return PiecewiseDecoder(decoder, self._accelerator)

    def forget(self) -> None:
        """Release the weights of this version; nothing is computed with them any more."""
        self.decoder.forget()


class PiecewiseStep:
    """One step of a decoder that is computed in parts: begin, runs of layers, and then the head. Implements
    `ForwardModel` once all layers are done.
    """

    batch: StepBatch
    rope: CosSin
    x: torch.Tensor
    residual: torch.Tensor | None = None

    def __init__(self, decoder: Decoder, kv: list[torch.Tensor]) -> None:
        self._decoder, self._kv = decoder, kv

    def begin(self, batch: StepBatch) -> None:
        self.batch, self.rope, self.x = batch, self._decoder.rope(batch), self._decoder.embedded(batch.token_ids)

    def through(self, first: int, layers: list[Layer]) -> None:
        for layer, cache in zip(layers, self._kv[first:], strict=False):
            self.x, self.residual = layer(self.x, self.residual, self.rope, cache, self.batch)

    def forward(self, batch: StepBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        return self._decoder.ended(batch, self._stream)

    def hidden(self, batch: StepBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        return self._decoder.normed(*self._stream)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(hidden)

    @property
    def _stream(self) -> HiddenStream:
        assert self.residual is not None, "a decoder has at least one layer"
        return self.x, self.residual


def _layer_runs(layers: list[Layer]) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, last) of layers: consecutive layers that stay on the device together, each offloaded layer
    alone.
    """
    first = 0
    for index, layer in enumerate(layers):
        if isinstance(layer, OffloadedLayer):
            if first < index:
                yield first, index
            yield index, index + 1
            first = index + 1
    if first < len(layers):
        yield first, len(layers)


def piecewise_model(decoder: Decoder, accelerator: Accelerator) -> Decoder | PiecewiseDecoder:
    """Return the model as a GPU's runner takes it: the decoder itself if all its layers stay on the device, else a
    `PiecewiseDecoder`.
    """
    return PiecewiseDecoder(decoder, accelerator) if isinstance(decoder.tier, DeviceTier) else decoder
