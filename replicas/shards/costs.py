"""How many layers each stage of a host gets: what its layers cost is told from headers, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...kernels.ops import Ops
from ..blocks import blocks_for
from ..checkpoint import Checkpoint
from ..engine_config import EngineConfig
from ..fit import outlined
from ..memory import free_memory
from ..predict import linear_shapes
from ..protocol import BLOCK_TOKENS
from .partition import Cost, StageDevice, partition, stage_seconds

__all__ = ["best_layers", "chosen_layers", "core"]

# Of a core, about: all processes have as many, so that only how parts compare matters.
_BANDWIDTH, _COMPUTE = 1e10, 1e11
_CONTEXT = 1024  # tokens of KV that a step reads


def chosen_layers(
    checkpoint: Checkpoint, config: EngineConfig, make_ops: Callable[[], Ops]
) -> tuple[tuple[int, ...], str]:
    """Layers of each stage, and why so many. make_ops: an outline has operators of its own. Raises InvalidRequest."""
    model, stages = checkpoint.config, config.pipeline_parallel
    if config.pipeline_layers is not None:
        return config.pipeline_layers, f"{_list(config.pipeline_layers)} layers: as configured"
    if stages == 1:
        return (model.num_layers,), "all layers: there is one stage"
    longest = config.max_model_len or BLOCK_TOKENS  # where it is not said, it is what there is room for
    return best_layers(checkpoint, make_ops(), [core(free_memory())] * stages, longest)


def core(memory_bytes: int) -> StageDevice:
    """A CPU's, of which no table tells how fast it is."""
    return StageDevice(_BANDWIDTH, _COMPUTE, memory_bytes)


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
