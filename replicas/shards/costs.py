"""How many layers each stage gets: what its layers cost is told from headers, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...kernels.ops import Ops
from ...kernels.precision import policy_of
from ..blocks import blocks_for
from ..checkpoint import Checkpoint
from ..engine_config import EngineConfig
from ..fit import Place, outlined
from ..memory import free_memory, reserve_bytes
from ..predict import linear_shapes
from ..protocol import BLOCK_TOKENS
from .launch import Launcher, Subprocesses
from .partition import Cost, StageDevice, partition, stage_seconds
from .places import places_of

__all__ = ["best_layers", "chosen_layers", "core", "stage_devices"]

# Of a core, about: all processes have as many, so that only how parts compare matters.
_BANDWIDTH, _COMPUTE = 1e10, 1e11
_CONTEXT = 1024  # tokens of KV that a step reads


def chosen_layers(
    checkpoint: Checkpoint, config: EngineConfig, make_ops: Callable[[], Ops], launcher: Launcher | None = None
) -> tuple[tuple[int, ...], str]:
    """Layers of each stage, and why so many. make_ops: an outline has operators of its own. Raises InvalidRequest.

    config  of the first process
    """
    model, stages = checkpoint.config, config.pipeline_parallel
    if config.pipeline_layers is not None:
        return config.pipeline_layers, f"{_list(config.pipeline_layers)} layers: as configured"
    if stages == 1:
        return (model.num_layers,), "all layers: there is one stage"
    longest = config.max_model_len or BLOCK_TOKENS  # where it is not said, it is what there is room for
    if config.device == "cpu":
        return best_layers(checkpoint, make_ops(), [core(free_memory())] * stages, longest)
    places, assumed = places_of(config, launcher or Subprocesses())
    devices = stage_devices(checkpoint, places, config.tensor_parallel)
    layers, why = best_layers(checkpoint, places[0].ops(), devices, longest)
    return layers, f"{why}{assumed}"


def core(memory_bytes: int) -> StageDevice:
    """A CPU's, of which no table tells how fast it is."""
    return StageDevice(_BANDWIDTH, _COMPUTE, memory_bytes)


def stage_devices(checkpoint: Checkpoint, places: Sequence[Place], ranks: int) -> list[StageDevice]:
    """Of each stage's GPUs, so many of a kind, as if they were one."""
    by_place = {place.name: _layer_bytes(checkpoint, place) for place in places}
    first = by_place[places[0].name]  # what layers cost is told of the first one's
    return [_stage_device(place, ranks, first / by_place[place.name]) for place in places]


def _layer_bytes(checkpoint: Checkpoint, place: Place) -> int:
    """A card that computes in fp32 holds weights in it, and has twice as much to read."""
    decoder = outlined(checkpoint.config, checkpoint.format, checkpoint.tensors, place.ops())
    return decoder.layers[0].held.nbytes


def _stage_device(place: Place, ranks: int, share: float) -> StageDevice:
    """share: a layer's bytes on the first stage's, over those here."""
    assert place.device is not None
    rate = place.device.rates[policy_of(*place.device.capability.version).prefill.arithmetic]
    free = place.free - reserve_bytes(place.total)
    return StageDevice(ranks * share * place.device.bandwidth, ranks * rate, ranks * share * free)


def best_layers(
    checkpoint: Checkpoint, ops: Ops, devices: Sequence[StageDevice], tokens: int
) -> tuple[tuple[int, ...], str]:
    """Layers of the stage on each device, and why so many. tokens: of KV that there is to be room for.

    Raises InvalidRequest.
    """
    model = checkpoint.config
    decoder = outlined(model, checkpoint.format, checkpoint.tensors, ops)
    [cache] = ops.allocate_kv(1, 1, model.num_kv_heads, model.head_dim)
    room, read = cache.nbytes * blocks_for(tokens), cache.nbytes * blocks_for(min(_CONTEXT, model.max_model_len))
    operations = 2 * sum(outputs * inputs for outputs, inputs in linear_shapes(model))
    layers = [Cost(held + read, operations, held + room) for held in (layer.held.nbytes for layer in decoder.layers)]
    table, head = decoder.embedding.nbytes, decoder.head.held.nbytes
    first, last = Cost(0, 0, table), Cost(head, 2 * model.vocab_size * model.hidden_size, head)
    found = partition(layers, first, last, devices)
    share = stage_seconds(devices[-1], [last]) / stage_seconds(devices[-1], layers[-1:])
    return found, f"{_list(found)} layers: the slowest stage takes the least; the head is as much as {share:.2g} layers"


def _list(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
