"""Construction of an engine's shared prefixes from its settings, its model and its operators."""

from __future__ import annotations

import math

from ....kernels.ops import Ops
from ...engine_config import EngineConfig
from ...errors import InvalidRequest
from ...execution.numerics_class import engine_numerics_class
from ...execution.swapper import Swapper
from ...host.host_memory import free_memory
from ...kv.blocks import BlockPool, blocks_for
from ...kv.host_blocks import LentBlockPool
from ...kv.memory_budget import prefix_budget
from ...kv.prefix.rounding_trial import (
    MAX_DIVERGENCE_NATS,
    PROBE_TOKENS,
    LogitsRunner,
    RoundingTrial,
    record_divergence,
)
from ...kv.prefix.store_link import StoreLink
from ...kv.store.host_kv import HostKv, RecordPayloads
from ...kv.store.sealed_record import Geometry, RecordSealer
from ...kv.store.store_access import PrefixStoreAccess
from ...kv.store.store_keys import StoreKeys, kv_identity, with_value_tokens
from ...kv.store.store_worker import HostRecords, StoreOpExecutor, ThreadedStoreWorker
from ...loading.model_loader import LoadedModel
from ...types import BLOCK_TOKENS
from ..kv_reuse.prefix_connector import PrefixConnector

__all__ = ["build_prefix_connector", "engine_kv_identity", "num_lent_blocks", "record_geometry"]


def record_geometry(config: EngineConfig, loaded: LoadedModel, ops: Ops) -> Geometry:
    """Return the shape of this engine's records. Raises InvalidRequest for a dtype that they cannot have."""
    kv = _kv_dtype(config, ops)
    dtype = config.prefix_wire or kv
    if kv == "int8" and dtype != kv:
        message = f"prefix_wire: {dtype!r} is not accepted: KV is int8, and so are its stored prefixes; leave it out"
        raise InvalidRequest(message, param="prefix_wire")
    model = loaded.config
    return with_value_tokens(Geometry(dtype, model.num_layers, *model.kv_shape, BLOCK_TOKENS))


def num_lent_blocks(config: EngineConfig, loaded: LoadedModel, ops: Ops, block_bytes: int) -> int:
    """Return the number of blocks of the host for values on their way.

    block_bytes  bytes of a block, in all processes of the model together

    Raises InvalidRequest where they would hold less than two values, one in each direction.
    """
    value_blocks = record_geometry(config, loaded, ops).tokens // BLOCK_TOKENS
    min_bytes = 2 * value_blocks * block_bytes
    nbytes = prefix_budget(config.prefix_buffer_bytes, free_memory(), min_bytes, on_gpu=ops.device.type != "cpu")
    blocks = nbytes // block_bytes
    if blocks < 2 * value_blocks:
        message = f"prefix_buffer_bytes: {nbytes} is not accepted; expected {min_bytes} at least"
        raise InvalidRequest(message, param="prefix_buffer_bytes")
    return blocks


def build_prefix_connector(
    access: PrefixStoreAccess,
    config: EngineConfig,
    loaded: LoadedModel,
    ops: Ops,
    runner: LogitsRunner,
    swapper: Swapper,
    lent: int,
    arithmetic: str,
    host: HostRecords[RecordPayloads] | None = None,
) -> tuple[PrefixConnector, str]:
    """Return an engine's shared prefixes, and a description of them in words. Called before anything is in KV.

    lent        number of the swapper's blocks, its last ones, that they may use
    arithmetic  arithmetic of all processes of the model
    host        converts these blocks to records where other processes have parts of them; None if the swapper has all

    Raises InvalidRequest where `cryptography` is not installed, or rounding costs too much accuracy.
    """
    geometry = record_geometry(config, loaded, ops)
    try:
        seal = RecordSealer(access.secret, geometry)
    except ImportError as error:
        message = "prefix_cache: needs the package cryptography, which is not installed"
        raise InvalidRequest(message, param="prefix_cache") from error
    keys = StoreKeys(access.secret, engine_kv_identity(config, loaded, ops, arithmetic))
    host = HostKv(swapper.slabs(), ops.kv_vectors, geometry) if host is None else host
    rounded = f" in {geometry.dtype}"
    if geometry.dtype != _kv_dtype(config, ops):
        nats = _check_rounding(geometry, loaded, runner, swapper, host)
        rounded = f", rounded to {geometry.dtype}: {nats:.1e} nats a token"
    link = StoreLink(
        store_worker=ThreadedStoreWorker(StoreOpExecutor(access.store, seal, host)),
        keys=keys,
        pool=LentBlockPool(lent, swapper.num_blocks - lent),
        mark=swapper.mark,
        value_blocks=geometry.tokens // BLOCK_TOKENS,
        value_bytes=geometry.size,
        after=config.prefix_after,
    )
    any_class = "any numerics class: last digits may differ from those computed here"
    of = any_class if config.prefix_any_numerics else engine_numerics_class(config, arithmetic)
    size = f"values of {geometry.tokens} tokens, {geometry.size / 2**20:.2f} MiB{rounded}"
    return PrefixConnector(link), f"{size}; of {of}; {lent} blocks on the host for values in transfer"


def engine_kv_identity(config: EngineConfig, loaded: LoadedModel, ops: Ops, arithmetic: str) -> bytes:
    """Return what identifies the engines that may share KV with this one, as `keys.identity` does.

    arithmetic  arithmetic of all processes of the model

    Raises InvalidRequest as `record_geometry` does.
    """
    geometry = record_geometry(config, loaded, ops)
    if config.prefix_any_numerics:
        return kv_identity(loaded.fingerprint, geometry, geometry.dtype, None)
    return kv_identity(loaded.fingerprint, geometry, _kv_dtype(config, ops), engine_numerics_class(config, arithmetic))


def _kv_dtype(config: EngineConfig, ops: Ops) -> str:
    return config.kv_dtype or str(ops.dtype).removeprefix("torch.")


def _check_rounding(
    geometry: Geometry, loaded: LoadedModel, runner: LogitsRunner, swapper: Swapper, host: HostRecords[RecordPayloads]
) -> float:
    """Measure what rounding KV to the record's dtype costs, in nats a token. Raises InvalidRequest where it is too
    much.
    """
    num_value_blocks = geometry.tokens // BLOCK_TOKENS
    lent = list(range(swapper.num_blocks - num_value_blocks, swapper.num_blocks))
    tokens = tuple((7 * i + 3) % loaded.config.vocab_size for i in range(geometry.tokens + PROBE_TOKENS))
    blocks = blocks_for(len(tokens))
    if len(tokens) > loaded.config.max_model_len or blocks > swapper.device_blocks:
        raise InvalidRequest(
            f"prefix_wire: its cost is measured on {len(tokens)} tokens, more than context length or KV memory allow",
            param="prefix_wire",
        )
    with BlockPool(blocks).open(()) as allocation:
        allocation.grow(len(tokens))
        nats = record_divergence(RoundingTrial(runner, swapper, host, lent, allocation), tokens)
    if nats == math.inf:
        message = f"prefix_wire: {geometry.dtype} has no room for this model's KV; expected another, or none"
        raise InvalidRequest(message, param="prefix_wire")
    if nats > MAX_DIVERGENCE_NATS:
        message = (
            f"prefix_wire: {geometry.dtype} changes this model's tokens "
            f"by {nats:.1e} nats each, over {MAX_DIVERGENCE_NATS:g}"
        )
        raise InvalidRequest(message, param="prefix_wire")
    return nats
