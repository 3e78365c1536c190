"""Worker whose device is simulated in real time, for `motley serve --simulate`."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ...kernels.device.device_spec import DeviceSpec
from ..capacity.device_fit import build_meta_decoder, table_devices
from ..engine.entrypoints.null_engine import NullDevice, build_null_engine
from ..engine.entrypoints.worker import Worker
from ..engine.startup.engine_builder import BuiltEngine
from ..engine_config import EngineConfig
from ..model.checkpoint_inspection import Checkpoint, inspect_checkpoint, resolve_model
from ..model.roofline_times import linear_works
from .roofline_rates import roofline_rates
from .roofline_runner import RooflineRunner
from .simulated_device import (
    ASSUMED_SHARES,
    HIDDEN_DEVIATION,
    INT4_WEIGHTS,
    RooflineShares,
    SimulatedDevice,
    SimulatedModel,
    SimulatedWeights,
    find_model_shape,
    find_table_device,
)

__all__ = ["SIMULATED", "SimulatedWorker", "build_null_device", "checkpoint_shape", "checkpoint_weights"]

log = logging.getLogger(__name__)

SIMULATED = "simulated"


def checkpoint_shape(checkpoint: Checkpoint, name: str) -> SimulatedModel:
    """Return a checkpoint's model for the roofline."""
    config = checkpoint.config
    return SimulatedModel(name, config.hidden_size, config.vocab_size, tuple(Counter(config.layers).items()))


def checkpoint_weights(checkpoint: Checkpoint, gpu: DeviceSpec) -> SimulatedWeights:
    """Return how that GPU would hold the largest linear of a layer; what its kernels do not take is held
    unquantized.
    """
    [place] = [place for place in table_devices() if place.device is gpu]
    decoder = build_meta_decoder(checkpoint.config, checkpoint.format, checkpoint.tensors, place.ops())
    works = (work for layer in dict.fromkeys(decoder.layers) for work in linear_works(layer, 1))
    found = max(works, key=lambda work: work.n * work.k)
    return SimulatedWeights(found.bits, found.group, found.activations)


def build_null_device(device: SimulatedDevice, rng: random.Random, hidden: float = HIDDEN_DEVIATION) -> NullDevice:
    """Return a stand-in engine for the device, whose true speed differs from its profile by up to the share
    `hidden`.
    """
    true = device.hidden(rng, hidden)
    name = f"{device.device.name}, simulated with {device.model.name} in {device.weights}"
    takes = "the time of the roofline"
    if device.attained != ASSUMED_SHARES:
        name, takes = f"{name}, {device.attained}", f"the time of the roofline, {device.attained}"

    def runner(said: Sequence[int]) -> RooflineRunner:
        return RooflineRunner(true, said)

    choices = {"engine": f"{name}: computes nothing, takes {takes}; what it says means nothing"}
    capability = str(device.device.capability)
    return NullDevice(SIMULATED, name, choices, runner, device.num_blocks, capability, partial(roofline_rates, device))


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
        hidden: float = HIDDEN_DEVIATION,
        seed: int | None = None,
        attained: RooflineShares = ASSUMED_SHARES,
    ) -> None:
        super().__init__(model, config, name=name)
        self._gpu = gpu
        self._shape = shape
        self._hidden = hidden
        self._seed = seed
        self._attained = attained

    def _build(self) -> BuiltEngine:
        checkpoint = inspect_checkpoint(resolve_model(self._model))
        name, gpu = self._name or checkpoint.folder.name, find_table_device(self._gpu)
        if self._shape is None:
            shape, weights = checkpoint_shape(checkpoint, name), checkpoint_weights(checkpoint, gpu)
        else:
            shape, weights = find_model_shape(self._shape), INT4_WEIGHTS
        device = SimulatedDevice(gpu, shape, weights, attained=self._attained)
        log.warning("simulated: nothing is computed")
        stand = build_null_device(device, random.Random(self._seed), self._hidden)
        return build_null_engine(self._model, self._config, stand, name=self._name)
