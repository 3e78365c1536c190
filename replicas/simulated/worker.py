"""Worker whose device is simulated in real time, for `motley serve --simulate`."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ...kernels.device.device_spec import DeviceSpec
from ...kernels.launch.model_shapes import ModelShape
from ..build import BuiltEngine
from ..checkpoint import Checkpoint, inspect_checkpoint, resolve_model
from ..engine_config import EngineConfig
from ..fit import outlined, table
from ..null_engine import StandIn, build_hollow_engine
from ..predict import linear_of, linear_shapes
from ..worker import Worker
from .device import ASSUMED, HIDDEN, INT4, Attained, SimulatedDevice, Weights, device_named, model_named
from .reckoned import reckoned
from .runner import RooflineRunner

__all__ = ["SIMULATED", "SimulatedWorker", "shape_of", "stand_in", "weights_of"]

log = logging.getLogger(__name__)

SIMULATED = "simulated"


def shape_of(checkpoint: Checkpoint, name: str) -> ModelShape:
    """Return the shape of a checkpoint's model for the roofline."""
    config = checkpoint.config
    return ModelShape(
        name, config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads,
        config.head_dim, config.num_layers, config.vocab_size,
    )  # fmt: skip


def weights_of(checkpoint: Checkpoint, gpu: DeviceSpec) -> Weights:
    """Return how that GPU would hold the largest linear of a layer; what its kernels do not take is held
    unquantized.
    """
    [place] = [place for place in table() if place.device is gpu]
    decoder = outlined(checkpoint.config, checkpoint.format, checkpoint.tensors, place.ops())
    pairs = list(zip(decoder.layers[0].linears, linear_shapes(checkpoint.config), strict=True))
    joined, (outputs, inputs) = max(pairs, key=lambda pair: pair[1][0] * pair[1][1])
    found = linear_of(joined, 1, outputs, inputs)
    return Weights(found.bits, found.group, found.activations)


def stand_in(device: SimulatedDevice, rng: random.Random, hidden: float = HIDDEN) -> StandIn:
    """Return a stand-in engine for the device, whose true speed differs from its profile by up to the share
    `hidden`.
    """
    true = device.hidden(rng, hidden)
    name = f"{device.device.name}, simulated with {device.model.name} in {device.weights}"
    takes = "the time of the roofline"
    if device.attained != ASSUMED:
        name, takes = f"{name}, {device.attained}", f"the time of the roofline, {device.attained}"

    def runner(said: Sequence[int]) -> RooflineRunner:
        return RooflineRunner(true, said)

    choices = {"engine": f"{name}: computes nothing, takes {takes}; what it says means nothing"}
    capability = str(device.device.capability)
    return StandIn(SIMULATED, name, choices, runner, device.num_blocks, capability, partial(reckoned, device))


class SimulatedWorker(Worker):
    """Real worker, engine, scheduler and KV accounting over a simulated device. The rates in its profile are the
    roofline's, not the device's true ones.

    gpu       torch's name of the GPU, or a part that identifies it ("P40")
    shape     name of the model whose time steps take; None for that of the checkpoint, whose tokens are used in either
              case
    hidden    share by which the true speed may differ from the profile
    seed      seed of that difference; None for a random one
    attained  shares of the roofline that its profile assumes kernels to reach
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig,
        gpu: str,
        shape: str | None = None,
        *,
        name: str | None = None,
        hidden: float = HIDDEN,
        seed: int | None = None,
        attained: Attained = ASSUMED,
    ) -> None:
        super().__init__(model, config, name=name)
        self._gpu = gpu
        self._shape = shape
        self._hidden = hidden
        self._seed = seed
        self._attained = attained

    def _build(self) -> BuiltEngine:
        checkpoint = inspect_checkpoint(resolve_model(self._model))
        name, gpu = self._name or checkpoint.folder.name, device_named(self._gpu)
        if self._shape is None:
            shape, weights = shape_of(checkpoint, name), weights_of(checkpoint, gpu)
        else:
            shape, weights = model_named(self._shape), INT4
        device = SimulatedDevice(gpu, shape, weights, attained=self._attained)
        log.warning("simulated: nothing is computed")
        stand = stand_in(device, random.Random(self._seed), self._hidden)
        return build_hollow_engine(self._model, self._config, stand, name=self._name)
