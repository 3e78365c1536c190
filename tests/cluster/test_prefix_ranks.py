"""A record in Redis and the ranks of tensor parallelism: each reads its own heads into its own KV, whoever wrote it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from serve_process import wait_for

from motley.cluster.prefix_store.redis_source import RedisSource
from motley.cluster.prefix_store.redis_store import RedisStore
from motley.kernels.cpu.cpu_ops import CpuOps
from motley.replicas.execution.copier import CpuCopier
from motley.replicas.execution.step_plan import StepPlan
from motley.replicas.execution.swapper import Swapper
from motley.replicas.kv.store.host_kv import HostKv, RecordPayloads
from motley.replicas.kv.store.sealed_record import HEADER_BYTES, Geometry, RecordSealer
from motley.replicas.kv.store.store_ops import HIT, FetchOp, SaveOp
from motley.replicas.kv.store.store_worker import StoreOpExecutor
from motley_bench.prefix.redis_process import RedisProcess

SECRET, KEY = b"s" * 32, b"k" * 32
GEOMETRY = Geometry("bfloat16", layers=3, heads=4, head_dim=64, tokens=32)
BLOCKS = 2  # of a record


class Rank:
    """Some of the model's heads: their KV on the device, [layer][K/V] of [blocks, heads, 16, D], and an executor."""

    def __init__(self, store: RedisStore, heads: range) -> None:
        self.ops = CpuOps(torch.bfloat16, "exact", None, None, "tests")
        self.kv = self.ops.allocate_kv(GEOMETRY.layers, BLOCKS, len(heads), GEOMETRY.head_dim)
        self.swapper = Swapper([part for cache in self.kv for part in self.ops.kv_parts(cache)], CpuCopier(), BLOCKS)
        self.seal, self.heads = RecordSealer(SECRET, GEOMETRY), heads
        self.host = HostKv(self.swapper.slabs(), self.ops.kv_vectors, GEOMETRY)
        self.executor: StoreOpExecutor[RecordPayloads] = StoreOpExecutor(store, self.seal, self.host, heads)

    @property
    def vectors(self) -> torch.Tensor:
        """[layers, K/V, blocks, heads here, 16, D]"""
        views = [self.ops.kv_vectors(self.ops.kv_parts(cache)) for cache in self.kv]
        return torch.stack([torch.stack(list(layer[:2])) for layer in views])

    def fill(self, vectors: torch.Tensor) -> None:
        """From the KV of all heads."""
        for layer, cache in enumerate(self.kv):
            for kv, view in enumerate(self.ops.kv_vectors(self.ops.kv_parts(cache))[:2]):
                view.copy_(vectors[layer, kv, :, self.heads.start : self.heads.stop])
        self.swapper.swap(StepPlan((), swap_out=tuple((i, i) for i in range(BLOCKS))))

    def sealed(self, header: bytes) -> memoryview:
        """Its heads' part of the record."""
        payloads = self.host.allocate_payloads()
        assert self.host.pack(range(BLOCKS), payloads)
        return self.seal.seal(KEY, header, payloads.buffers, self.heads.start)

    def fetch(self) -> None:
        now = time.monotonic()
        fetch = FetchOp(keys=(KEY,), blocks=(tuple(range(BLOCKS)),), value_s=1e3, sent=now, expires=now)
        wait_for(
            lambda: self.executor.do(fetch, self.executor.make_buffers()) or fetch.count, f"a hit, not {fetch.outcome}"
        )
        assert fetch.outcome == HIT
        self.swapper.swap(StepPlan((), swap_in=tuple((i, i) for i in range(BLOCKS))))


def ranks(store: RedisStore, degree: int) -> list[Rank]:
    share = GEOMETRY.heads // degree
    return [Rank(store, range(first, first + share)) for first in range(0, GEOMETRY.heads, share)]


@pytest.fixture
def store(redis: RedisProcess, tmp_path: Path) -> Iterator[RedisStore]:
    redis.ask("FLUSHALL")
    store = RedisStore(RedisSource(url=redis.url, secret=SECRET, connections=1))
    wait_for(lambda: store._connections.alive, "a connection")
    yield store
    store.close()


def sent(redis: RedisProcess) -> int:
    """Bytes that it has sent to anybody."""
    found = re.search(rb"total_net_output_bytes:(\d+)", redis.ask("INFO", "stats") or b"")
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(("written_by", "read_by"), [(2, 1), (1, 2), (2, 4), (4, 2)])
def test_each_rank_reads_its_heads_and_no_others(
    redis: RedisProcess, store: RedisStore, written_by: int, read_by: int
) -> None:
    shape = GEOMETRY.layers, 2, BLOCKS, GEOMETRY.heads, 16, GEOMETRY.head_dim
    vectors = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    writers = ranks(store, written_by)
    header = writers[0].seal.header()
    for rank in writers:
        rank.fill(vectors)
    assert store.put(KEY, [header, *[rank.sealed(header) for rank in writers]], "ann")
    store.flush(time.monotonic() + 20)
    for rank in ranks(store, read_by):
        before, read = sent(redis), store.stats().bytes_read
        rank.fetch()
        assert torch.equal(rank.vectors, vectors[:, :, :, rank.heads.start : rank.heads.stop])
        own = HEADER_BYTES + len(rank.heads) * GEOMETRY.sealed_bytes
        assert store.stats().bytes_read - read == own
        assert own <= sent(redis) - before < own + 8192, "what Redis says of itself is a few thousand bytes"


def test_one_rank_of_one_writes_what_ranks_of_two_read(store: RedisStore) -> None:
    """The executor's own way of writing."""
    [writer] = ranks(store, 1)
    vectors = torch.randn(GEOMETRY.layers, 2, BLOCKS, GEOMETRY.heads, 16, GEOMETRY.head_dim).to(torch.bfloat16)
    writer.fill(vectors)
    save = SaveOp(key=KEY, blocks=tuple(range(BLOCKS)), owner="ann", mark=writer.swapper.mark())
    writer.executor.do(save, writer.executor.make_buffers())
    assert save.saved
    store.flush(time.monotonic() + 20)
    for rank in ranks(store, 2):
        rank.fetch()
        assert torch.equal(rank.vectors, vectors[:, :, :, rank.heads.start : rank.heads.stop])
