"""KV of one dtype in Redis, read by replicas of another: as near as rounding says, and never infinite."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serve_process import wait_for

from motley.cluster.prefix_store.redis_source import RedisSource
from motley.cluster.prefix_store.redis_store import RedisStore
from motley.kernels.cpu.cpu_ops import CpuOps
from motley.kernels.device.device_context import interpreter_context
from motley.kernels.gpu.gpu_ops import GpuOps
from motley.kernels.ops import Ops
from motley.replicas.demo import demo_path
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.engine.kv_reuse import fetch_scheduler
from motley.replicas.errors import InvalidRequest
from motley.replicas.execution.copier import CpuCopier
from motley.replicas.execution.step_plan import StepPlan
from motley.replicas.execution.swapper import Swapper
from motley.replicas.kv.blocks import extend_hashes
from motley.replicas.kv.prefix.rounding_trial import MAX_DIVERGENCE_NATS
from motley.replicas.kv.store import fetch_cost, store_worker
from motley.replicas.kv.store.fetch_cost import FetchCostModel
from motley.replicas.kv.store.host_kv import HostKv, RecordPayloads
from motley.replicas.kv.store.sealed_record import Geometry, RecordSealer
from motley.replicas.kv.store.store_access import PrefixStoreAccess
from motley.replicas.kv.store.store_ops import HIT, MISS, OUT_OF_RANGE, FetchOp, SaveOp
from motley.replicas.kv.store.store_worker import StoreOpExecutor
from motley.replicas.types import SamplingParams
from motley_bench.prefix.foreign_kv import ForeignKvDeviation, NumericsPlan, measure_deviations, measure_numerics
from motley_bench.prefix.redis_process import RedisProcess

SECRET, KEY = b"s" * 32, b"k" * 32
LAYERS, HEADS, DIM, BLOCKS = 3, 2, 64, 2
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
ROUNDS = {"float16": (2**-11, 2**-25), "bfloat16": (2**-8, 0.0)}  # relative; below the least normal number, absolute


class Card:
    """KV as a GPU lays it out, in the dtype that its policy stores, and an executor that writes `wire` and reads it."""

    def __init__(self, store: RedisStore, dtype: str, wire: str) -> None:
        self.ops: Ops = GpuOps(interpreter_context((6, 1) if dtype == "float16" else (8, 6)))
        self.kv = [cache.to(HALVES[dtype]) for cache in self.ops.allocate_kv(LAYERS, BLOCKS, HEADS, DIM)]
        self.swapper = Swapper([part for cache in self.kv for part in self.ops.kv_parts(cache)], CpuCopier(), BLOCKS)
        geometry = Geometry(wire, LAYERS, HEADS, DIM, BLOCKS * 16)
        host = HostKv(self.swapper.slabs(), self.ops.kv_vectors, geometry)
        self.executor: StoreOpExecutor[RecordPayloads] = StoreOpExecutor(store, RecordSealer(SECRET, geometry), host)
        self.buffers, self.store = self.executor.make_buffers(), store

    @property
    def views(self) -> list[torch.Tensor]:
        """[blocks, heads, 16, D] of each layer's keys, then of its values."""
        return [view for cache in self.kv for view in self.ops.kv_vectors(self.ops.kv_parts(cache))]

    @property
    def numbers(self) -> torch.Tensor:
        return torch.stack([view.float() for view in self.views])

    def write(self) -> SaveOp:
        """Its KV, and wait until it is there."""
        self.swapper.swap(StepPlan((), swap_out=tuple((i, i) for i in range(BLOCKS))))
        save = SaveOp(key=KEY, blocks=tuple(range(BLOCKS)), owner="ann", mark=self.swapper.mark())
        self.executor.do(save, self.buffers)
        self.store.flush(time.monotonic() + 20)
        return save

    def read(self, expected: str = HIT) -> FetchOp:
        """Until it ends so: on a busy machine a read may be late."""

        def fetched() -> bool:
            nonlocal fetch
            now = time.monotonic()
            fetch = FetchOp(keys=(KEY,), blocks=(tuple(range(BLOCKS)),), value_s=1e3, sent=now, expires=now)
            self.executor.do(fetch, self.buffers)
            return fetch.outcome == expected

        fetch: FetchOp = FetchOp(keys=(), blocks=(), value_s=0.0, sent=0.0, expires=0.0)
        wait_for(fetched, expected)
        if fetch.count:
            self.swapper.swap(StepPlan((), swap_in=tuple((i, i) for i in range(BLOCKS))))
        return fetch


@pytest.fixture
def store(redis: RedisProcess) -> Iterator[RedisStore]:
    redis.ask("FLUSHALL")
    store = RedisStore(RedisSource(url=redis.url, secret=SECRET))
    wait_for(lambda: store._connections.alive, "a connection")
    yield store
    store.close()


def fill(card: Card) -> torch.Tensor:
    """Numbers of every size that a model's KV has, and some that have no place in float16's normal range."""
    generator = torch.Generator().manual_seed(7)
    for view in card.views:
        numbers = torch.randn(view.shape, generator=generator)
        view.copy_(numbers * torch.pow(2.0, torch.randint(-24, 13, view.shape, generator=generator)))
    return card.numbers


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
@pytest.mark.parametrize(("one", "other"), [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_what_one_dtype_writes_the_other_reads(store: RedisStore, one: str, other: str, wire: str) -> None:
    """By rounding to the record's dtype and to one's own, and by nothing else."""
    writer, reader = Card(store, one, wire), Card(store, other, wire)
    wrote = fill(writer)
    assert writer.write().saved
    reader.read()
    came = reader.numbers
    assert torch.equal(came, wrote.to(HALVES[wire]).to(HALVES[other]).float())
    bounds = [ROUNDS[dtype] for dtype in {wire, other} - {one}]
    relative, least = (sum(bound[i] for bound in bounds) for i in range(2))
    assert ((came - wrote).abs() <= 1.01 * relative * wrote.abs() + least).all()
    assert not torch.equal(came, wrote), "bounds that say something"


def test_float16_holds_bfloat16_to_the_bit_where_it_has_the_range(store: RedisStore) -> None:
    """Eight bits of mantissa of eleven: a fleet of new cards and one old one loses nothing among the new."""
    writer, reader = (Card(store, "bfloat16", "float16") for _ in range(2))
    wrote = fill(writer)
    assert writer.write().saved
    reader.read()
    held = wrote.abs() >= 2**-17
    assert torch.equal(reader.numbers[held], wrote[held])
    assert 0 < (~held).sum() < held.sum()
    assert ((reader.numbers - wrote)[~held].abs() <= 2**-25).all()


@pytest.mark.parametrize("number", [65_536.0, -1e5, 3e38])
def test_a_number_beyond_float16_is_not_written_and_that_is_told(store: RedisStore, number: float) -> None:
    writer, reader = Card(store, "bfloat16", "float16"), Card(store, "float16", "float16")
    fill(writer)
    writer.views[3][1, 1, 15, 63] = number
    save = writer.write()
    assert (save.saved, save.unfit) == (False, True)
    reader.read(MISS)
    writer.views[3][1, 1, 15, 63] = 65_280.0  # the largest of bfloat16 that float16 has
    save = writer.write()
    assert (save.saved, save.unfit) == (True, False)
    reader.read()
    assert reader.numbers.isfinite().all()
    assert reader.numbers.max() == 65_280.0


def test_a_record_beyond_float16_is_computed_again_where_kv_is_so(store: RedisStore) -> None:
    """Where somebody has chosen bfloat16 for a fleet with old cards: others read it."""
    writer = Card(store, "bfloat16", "bfloat16")
    wrote = fill(writer)
    writer.views[3][1, 1, 15, 63] = 1e5
    assert writer.write().saved
    old, new = Card(store, "float16", "bfloat16"), Card(store, "bfloat16", "bfloat16")
    assert old.read(OUT_OF_RANGE).count == 0
    new.read()
    assert new.numbers.max() > wrote.max()


PROMPT = [(7 * i) % 1000 + 5 for i in range(600)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, seed=0)
SHARED: dict[str, Any] = {"threads": 1, "kv_memory_bytes": 2**24, "max_running": 8, "prefix_any_numerics": True}


def engine(url: str, dtype: str, **settings: Any) -> Engine:
    """Fetching always seems faster, and computing to take long."""
    access = PrefixStoreAccess(RedisStore(RedisSource(url=url, secret=SECRET)), SECRET)
    made = Engine(demo_path(), dtype=dtype, access=access, prefix_after=1, **SHARED | settings)
    made._built.core.scheduler.prefixes.cost_model = FetchCostModel(token_s=1.0, block_s=1e-9)
    return made


def kv_of(one: Engine) -> torch.Tensor:
    """[layers, K/V, blocks, heads, 16, D] of the prompt's first 512 tokens, fp32."""
    built, hashes = one._built, list[bytes]()
    extend_hashes(hashes, b"", PROMPT)
    blocks = built.core.scheduler.pool.listed(tuple(hashes[:32]))
    assert blocks is not None
    views = [CpuOps.kv_vectors(None, (cache,)) for cache in built.runner.kv]  # type: ignore[arg-type]
    return torch.stack([torch.stack([view[list(blocks)].float() for view in layer]) for layer in views])


@pytest.mark.parametrize(("one", "other"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_engines_of_two_classes_read_each_other(
    redis: RedisProcess, one: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads what the other has computed, rounded, and near to what it would have computed itself."""
    for module in (fetch_cost, store_worker):
        monkeypatch.setattr(module, "MAX_READ_S", 60.0)
    monkeypatch.setattr(fetch_scheduler, "_GRACE_S", 60.0)
    redis.ask("FLUSHALL")
    writer, reader = (engine(redis.url, dtype, prefix_wire="float16") for dtype in (one, other))
    apart = engine(redis.url, other, prefix_wire="float16", prefix_any_numerics=False)
    for each in (writer, reader, apart):
        store: Any = each._built.access
        wait_for(lambda store=store.store: store._connections.alive, "a connection")
    try:
        names = {each._built.core.scheduler.prefixes.shares for each in (writer, reader)}
        assert len(names) == 1
        assert writer.generate(PROMPT, GREEDY)[0].cached_tokens == 0
        writer._built.flush(60.0)
        assert apart.generate(PROMPT, GREEDY)[0].cached_tokens == 0, "it has not been told to share"
        [read] = reader.generate(PROMPT, GREEDY)
        assert read.cached_tokens == 512
        wrote, came = kv_of(writer), kv_of(reader)
        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        assert torch.equal(came, wrote.to(torch.float16).to(dtypes[other]).float())
        own = kv_of(apart)
        assert not torch.equal(came, own)
        assert (came - own).norm() < 0.05 * own.norm(), "of another model it would be all of it"
        stats = reader._built.prefix_stats()
        assert stats is not None
        assert dict(stats.outcomes) == {"hit": 1}
    finally:
        for each in (writer, reader, apart):
            each._built.close()


SMALL = NumericsPlan(prefix=128, probed=32, texts=2)


@pytest.fixture(scope="module")
def told() -> dict[tuple[str, str, str], list[ForeignKvDeviation]]:
    return dict(measure_deviations(SMALL, lambda line: None))


def test_what_another_dtype_costs_is_within_what_rounding_may(
    told: dict[tuple[str, str, str], list[ForeignKvDeviation]],
) -> None:
    """The control shows that nothing else is measured; and bfloat16 through float16 is the same to the bit."""
    for way, each in told.items():
        nats = sum(one.nats for one in each) / len(each)
        assert nats <= MAX_DIVERGENCE_NATS, way
        lossless = way in (("bfloat16", "bfloat16", "bfloat16"), ("bfloat16", "float16", "bfloat16"))
        assert (max(one.logit for one in each) == 0) == lossless, way
    wires = [sum(one.nats for one in told["float32", wire, "float32"]) for wire in ("float16", "bfloat16")]
    assert wires[0] < wires[1], "three bits more"


def test_what_it_costs_is_told_by_way() -> None:
    rows = measure_numerics(NumericsPlan(ways=[("float32", "float16", "float32")], prefix=64, probed=16, texts=1), str)
    assert [each["metric"] for each in rows] == ["numerics_kl", "numerics_logit", "numerics_other_token"]
    assert all(each["workload"]["tokens"] == 16 for each in rows)
    assert all(each["source"] == "measured" for each in rows)


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("too short")
    plan = NumericsPlan(prefix=64, probed=16, texts=2, text=tmp_path / "text.txt")
    with pytest.raises(InvalidRequest, match=r"text: it has \d+ tokens; expected at least 2 times 80"):
        measure_numerics(plan, str)
