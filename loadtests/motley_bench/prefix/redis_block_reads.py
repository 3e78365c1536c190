"""Part of `motley bench prefix`: the whole way of values from Redis into the KV blocks of an engine."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from motley.cluster.prefix_store.redis_store import RedisStore
from motley.kernels.ops import ops_for_device
from motley.replicas.errors import MotleyError
from motley.replicas.execution.copier import CpuCopier
from motley.replicas.execution.swapper import Swapper
from motley.replicas.kv.store.host_kv import HostKv, RecordPayloads
from motley.replicas.kv.store.sealed_record import RecordSealer
from motley.replicas.kv.store.store_ops import FetchOp
from motley.replicas.kv.store.store_worker import StoreOpExecutor
from motley.replicas.types import BLOCK_TOKENS

_PATIENT_S = 1e3  # assumed seconds to compute a value, which gives a read the longest possible deadline
IN_VAIN_S = 30.0
PAUSE_S = 0.01


class BlocksReader:
    """Reader as a replica has one, with KV on a CPU: reads, decrypts, verifies, and writes into blocks of the host."""

    def __init__(self, store: RedisStore, seal: RecordSealer, keys: Sequence[bytes]) -> None:
        geometry = self._geometry = seal.geometry
        ops = ops_for_device(torch.device("cpu"), getattr(torch, geometry.dtype))
        kv = ops.allocate_kv(geometry.layers, 1, geometry.heads, geometry.head_dim)
        each = geometry.tokens // BLOCK_TOKENS
        swapper = Swapper([part for cache in kv for part in ops.kv_parts(cache)], CpuCopier(), each * len(keys))
        host = HostKv(swapper.slabs(), ops.kv_vectors, geometry)
        self._executor: StoreOpExecutor[RecordPayloads] = StoreOpExecutor(store, seal, host)
        self._buffers = self._executor.make_buffers()
        self._keys, self._blocks = keys, [tuple(range(i * each, (i + 1) * each)) for i in range(len(keys))]

    def read(self, nbytes: int) -> float:
        """Read `nbytes` bytes and return the rate in GB/s. Raises MotleyError if repeatedly nothing comes in time."""
        moved = 0
        began = came = time.perf_counter()
        while moved < nbytes:
            now = time.monotonic()
            fetch = FetchOp(
                keys=tuple(self._keys), blocks=tuple(self._blocks), value_s=_PATIENT_S, sent=now, expires=now
            )
            self._executor.do(fetch, self._buffers)
            moved += fetch.count * self._geometry.size
            if fetch.count:
                came = time.perf_counter()
                continue
            time.sleep(PAUSE_S)  # the machine is busy and the breaker has opened
            if time.perf_counter() - came > IN_VAIN_S:
                raise MotleyError(f"nothing comes from Redis within a read's deadline: {fetch.outcome}")
        return moved / (time.perf_counter() - began) / 1e9
