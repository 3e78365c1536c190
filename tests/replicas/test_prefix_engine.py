"""Prefixes between engines with a model: what the store does shows in what is computed, and never in what is said."""

from __future__ import annotations

import asyncio
import random
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_driver import drive
from engine_parts import Clock
from fake_prefixes import SECRET, BadStore, TurnCourier
from late_device import LateDevice, LateOps
from safetensors.torch import load_file, save_file
from store_timeouts import be_patient
from tiny_checkpoints import build_checkpoint

from motley.replicas.demo import demo_path
from motley.replicas.engine.engine import EngineCore
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine.kv_reuse.prefix_connector import PrefixConnector
from motley.replicas.engine.kv_reuse.swap_planner import SwapPlanner, SwapRates
from motley.replicas.engine.model_limits import ModelLimits
from motley.replicas.engine.scheduler import Scheduler
from motley.replicas.engine.startup.engine_builder import build_engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import InvalidRequest
from motley.replicas.execution.copier import CpuCopier
from motley.replicas.execution.runner import ModelRunner, Runner
from motley.replicas.execution.swapper import Swapper
from motley.replicas.gpu.gpu_runner import GpuRunner
from motley.replicas.kv.blocks import BlockPool, blocks_for
from motley.replicas.kv.host_blocks import LentBlockPool
from motley.replicas.kv.prefix import rounding_trial
from motley.replicas.kv.prefix.store_link import StoreLink
from motley.replicas.kv.store import host_kv
from motley.replicas.kv.store.fetch_cost import FetchCostModel
from motley.replicas.kv.store.host_kv import HostKv
from motley.replicas.kv.store.memory_store import MemoryPrefixStore
from motley.replicas.kv.store.sealed_record import Geometry, RecordSealer
from motley.replicas.kv.store.store_access import PrefixStoreAccess, in_memory_access
from motley.replicas.kv.store.store_keys import StoreKeys
from motley.replicas.kv.store.store_worker import StoreOpExecutor
from motley.replicas.loading.model_loader import LoadedModel, load_model
from motley.replicas.types import Request, SamplingParams, StreamMessage

LONGEST, RUNNING, KEPT, LENT = 256, 6, 20, 24
KINDS = ["cpu", "late", "early", "eager"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(build_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2), LateOps())


def make(
    loaded: LoadedModel,
    kind: str,
    store: MemoryPrefixStore | None,
    *,
    blocks: int = 40,
    seed: int = 0,
    wire: str = "float32",
) -> EngineCore:
    """Return an engine. With a store, operations come back in their own time, and copies are made as late or as early
    as they may.
    """
    ops, config = LateOps(), loaded.config
    kv = ops.allocate_kv(config.num_layers, blocks + 1, *config.kv_shape)
    parts = [part for cache in kv for part in ops.kv_parts(cache)]
    device = CpuCopier() if kind == "cpu" else LateDevice(early=kind == "early")
    swapper = Swapper(parts, device, KEPT + LENT)
    runner: Runner
    if kind == "cpu":
        runner = ModelRunner(loaded.decoder, kv, ops.device, swapper)
    else:
        assert isinstance(device, LateDevice)
        runner = GpuRunner(
            loaded.decoder, kv, ops, device, max_running=RUNNING, max_model_len=LONGEST,
            longest_blocks=blocks_for(LONGEST), padding_block=blocks, vocab_size=config.vocab_size,
            graphs=kind != "eager", swapper=swapper,
        )  # fmt: skip
    prefixes = None
    if store is not None:
        geometry = Geometry(wire, config.num_layers, *config.kv_shape, 32)
        rng = random.Random(seed)
        clerk = StoreOpExecutor(
            store, RecordSealer(SECRET, geometry), HostKv(swapper.slabs(), ops.kv_vectors, geometry), clock=Clock()
        )
        link = StoreLink(
            TurnCourier(clerk, lambda: rng.randrange(4)), StoreKeys(SECRET, b"tiny"), LentBlockPool(LENT, KEPT),
            swapper.mark, value_blocks=2, value_bytes=geometry.size, after=1,
        )  # fmt: skip
        prefixes = PrefixConnector(link, Clock())
        prefixes.cost_model = FetchCostModel(1e9, 1e-9)
    scheduler = Scheduler(
        BlockPool(blocks), max_batch_tokens=64, max_running=RUNNING, prefixes=prefixes,
        swap=SwapPlanner(KEPT, SwapRates(1e-9, 1e-9, 1.0)),
    )  # fmt: skip
    return EngineCore(runner, scheduler, ModelLimits(config.vocab_size, min(LONGEST, blocks * 16), (9,)), None)


def request(prompt: list[int], **params: Any) -> Request:
    params = {"temperature": 0.0, "max_tokens": 10, "seed": 5, "ignore_eos": True} | params
    return Request("r", tuple(prompt), SamplingParams(**params))


SYSTEM = [(7 * i) % 101 for i in range(70)]
SEEDED: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "top_p": 0.9}
CROWD = [
    request([*SYSTEM, *range(20)]),
    request([*SYSTEM, *range(40, 80)], **SEEDED),
    request([*SYSTEM[:50], *range(60)], temperature=0.8),
    request([*range(100, 120)] * 4, n=2, temperature=0.7),
    request([*SYSTEM, *range(20)], max_tokens=30),
    request([5] * 65, logprobs=2),
    request([*range(20, 68)], prompt_logprobs=1, max_tokens=8),
]


def run(core: EngineCore, requests: list[Request] = CROWD, **options: Any) -> list[dict[int, list[int]]]:
    found = []
    for messages in drive(core, requests, **options):
        each: dict[int, list[int]] = {}
        for delta in (delta for message in messages for delta in message.deltas):
            each.setdefault(delta.index, []).extend(delta.token_ids)
        found.append(each)
    return found


def settle(core: EngineCore) -> None:
    for _ in range(60):
        core.step()
    core.scheduler.prefixes.pool.check_idle()


@pytest.mark.slow("Four engines in turn answer the same seven requests")
@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [40, 9])
def test_nobody_can_tell(loaded: LoadedModel, kind: str, blocks: int) -> None:
    """One engine writes, others read, with room on the device or hardly any, whichever way copies race with steps."""
    expected = run(make(loaded, kind, None, blocks=64))
    store = MemoryPrefixStore(2**22, Clock())
    for seed in range(3):
        core = make(loaded, kind, store, blocks=blocks, seed=seed)
        assert run(core, apart=seed) == expected
        settle(core)
        load = core.load()
        assert (load.external_hit_tokens > 0) == (store.stats().hits > 0)
        if seed and blocks > 9:
            assert load.external_hit_tokens >= 2 * 64 + 32, "the system's prompt, and others'"
    assert store.stats().hits > 0


@pytest.mark.slow("Eight engines answer the same requests, six of them with faults")
@pytest.mark.parametrize("kind", ["cpu", "late"])
def test_what_a_value_loses_shows_nowhere(loaded: LoadedModel, kind: str) -> None:
    expected = run(make(loaded, kind, None, blocks=64))
    clock, rng = Clock(), random.Random(3)
    store = BadStore(clock)
    settled = make(loaded, kind, store)
    run(settled)
    settle(settled)
    for fault in ("flip", "cut", "other", "zeros", "miss", "raise"):
        store.fault = lambda fault=fault: fault if rng.random() < 0.5 else "none"  # type: ignore[misc]
        core = make(loaded, kind, store, seed=1)
        assert run(core) == expected, fault
        settle(core)


PROMPT = [(7 * i) % 1000 + 5 for i in range(600)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, seed=0)
SETTINGS: dict[str, Any] = {"threads": 1, "kv_memory_bytes": 2**24, "max_running": 8}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is: what is asked for is waited for."""
    be_patient(monkeypatch)


def eager(engine: Engine) -> Engine:
    """Fetching always seems faster, and computing to take long."""
    engine._built.core.scheduler.prefixes.cost_model = FetchCostModel(token_s=1.0, block_s=1e-9)
    return engine


def finish(engine: Engine) -> None:
    """Everything that is to be stored, is."""
    core = engine._built.core
    while core.scheduler.prefixes.waits or len(core.scheduler.prefixes.pool._free) < core.scheduler.prefixes.pool.total:
        core.step()
        core.scheduler.prefixes.wait(0.01)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return Engine(demo_path(), **SETTINGS).generate(PROMPT, GREEDY)[0].token_ids


@pytest.fixture
def written(patient: None) -> Iterator[tuple[PrefixStoreAccess, Engine]]:
    """A store that an engine has written to, and that engine."""
    access = in_memory_access(2**28)
    writer = eager(Engine(demo_path(), access=access, prefix_after=1, **SETTINGS))
    writer.generate(PROMPT, GREEDY)
    finish(writer)
    assert access.store.stats().values == 600 // 128
    yield access, writer
    writer._built.close()


@pytest.mark.slow("Two engines load the demo model and answer to 600 tokens")
def test_greedy_tokens_are_the_same_wherever_the_prefix_comes_from(
    written: tuple[PrefixStoreAccess, Engine], expected: list[int]
) -> None:
    """Nowhere, the engine's own KV, the store, and half of the store."""
    access, writer = written
    assert "128 tokens" in writer.choices["prefix_store"]
    reader = eager(Engine(demo_path(), access=access, prefix_after=99, **SETTINGS))
    store = access.store
    assert isinstance(store, MemoryPrefixStore)
    held = [(writer, 592), (reader, 512), (reader, 592)]
    for engine, cached in held:
        [output] = engine.generate(PROMPT, GREEDY)
        assert (output.cached_tokens, output.token_ids) == (cached, expected)
    pool = reader._built.core.scheduler.pool
    pool.forget_prefixes()
    fetched = list(store._values)[:2]
    for key in fetched:  # the first two chunks of four stay
        store._values.move_to_end(key)
    for key in list(store._values)[:2]:
        del store._values[key]
    [output] = reader.generate(PROMPT, GREEDY)
    assert (output.cached_tokens, output.token_ids) == (256, expected)
    stats = reader._built.prefix_stats()
    assert stats is not None
    assert dict(stats.outcomes) == {"hit": 1, "miss": 1}
    assert (stats.hit_tokens, stats.queried_tokens, stats.value_tokens) == (512 + 256, 1024, 128)
    [asked] = stats.popular
    assert (asked.requests, asked.found_tokens, asked.fetched_tokens, asked.longest) == (3, 592, 512 + 256, 592)
    assert "secret" not in repr(access)
    reader._built.core.scheduler.prefixes.close()


@pytest.mark.slow("Six engines load the demo model and answer to 600 tokens")
def test_other_weights_numerics_and_settings_do_not_meet(
    written: tuple[PrefixStoreAccess, Engine], expected: list[int], tmp_path: Any
) -> None:
    access, _ = written
    others: list[dict[str, Any]] = [{"dtype": "float32"}, {"numerics": "fast"}, {"prefix_wire": "int8"}]
    for settings in others:
        other = eager(Engine(demo_path(), access=access, prefix_after=99, **SETTINGS, **settings))
        assert other.generate(PROMPT, GREEDY)[0].cached_tokens == 0, settings
        other._built.core.scheduler.prefixes.close()
    shared: dict[str, Any] = {"prefix_any_numerics": True, "dtype": "bfloat16"}
    access = in_memory_access(2**28)
    exact = eager(Engine(demo_path(), access=access, prefix_after=1, **shared, **SETTINGS))
    exact.generate(PROMPT, GREEDY)
    finish(exact)
    fast = eager(Engine(demo_path(), access=access, numerics="fast", **shared, **SETTINGS))
    assert "any numerics class" in fast.choices["prefix_store"]
    assert fast.generate(PROMPT, GREEDY)[0].cached_tokens == 512
    for engine in (exact, fast):
        engine._built.close()


def test_a_checkpoint_with_other_weights_has_other_keys(loaded: LoadedModel, tmp_path: Any) -> None:
    """One number of one tensor is enough."""
    folders = [build_checkpoint(tmp_path / name, "llama", num_hidden_layers=2, seed=i) for i, name in enumerate("ab")]
    fingerprints = [load_model(folder, LateOps()).fingerprint for folder in folders]
    assert len({*fingerprints, loaded.fingerprint}) == 2, "the same numbers, wherever they lie"


async def test_a_worker_flushes_tells_and_closes(patient: None) -> None:
    made: list[PrefixStoreAccess] = []

    def access() -> PrefixStoreAccess:
        made.append(in_memory_access(2**28))
        return made[-1]

    worker = Worker(demo_path(), EngineConfig(**SETTINGS, prefix_after=1), access=access)
    assert worker.prefix_stats() is None
    await worker.start()
    [shared] = made

    async def ask(tenant: str) -> list[StreamMessage]:
        asked = Request("r", tuple(PROMPT), GREEDY, tenant=tenant, cache_salt=tenant.encode())
        return [message async for message in worker.generate(asked)]

    try:
        for tenant in ("one", "two"):
            await ask(tenant)
        async with asyncio.timeout(30):
            while shared.store.stats().values != 8:  # they are written after the answer
                await asyncio.sleep(0.01)
        await worker.flush("one")
        async with asyncio.timeout(30):
            while shared.store.stats().values != 4:
                await asyncio.sleep(0.01)
        stats = worker.prefix_stats()
        assert stats is not None
        assert (stats.saved, stats.store.stored) == (8, 8)
        assert worker.load().external_queried_tokens == stats.queried_tokens
    finally:
        await worker.close()
    assert shared.store.stats().values == 0


def test_an_engine_that_is_asked_to_keeps_prefixes_in_memory(patient: None) -> None:
    engine = eager(Engine(demo_path(), prefix_cache="memory", prefix_after=1, **SETTINGS))
    engine.generate(PROMPT, GREEDY)
    finish(engine)
    engine._built.core.scheduler.pool.forget_prefixes()
    assert engine.generate(PROMPT, GREEDY)[0].cached_tokens == 512
    engine._built.close()


def test_an_engine_that_is_closed_has_stored_what_it_should(patient: None) -> None:
    access = in_memory_access(2**28)
    with eager(Engine(demo_path(), access=access, prefix_after=1, **SETTINGS)) as engine:
        open_still = engine.stream(PROMPT, GREEDY)
        next(open_still)
    assert access.store.stats().stored == 600 // 128
    with pytest.raises(InvalidRequest, match="engine: it has been closed"):
        engine.generate(PROMPT, GREEDY)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefix_cache": "redis"}, "prefix_cache: 'redis' is not accepted; expected 'off' or 'memory'"),
        ({"prefix_wire": "float64"}, "prefix_wire: 'float64' is not accepted"),
        ({"prefix_after": 0}, "prefix_after: 0 is not accepted; expected a positive integer"),
        ({"prefix_buffer_bytes": 1000}, "prefix_buffer_bytes: 1000 is not accepted; expected "),
        ({"kv_dtype": "int8", "prefix_wire": "bfloat16"}, "prefix_wire: 'bfloat16' is not accepted: KV is int8"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        build_engine(demo_path(), EngineConfig(**({"prefix_cache": "memory"} | SETTINGS | settings)))
    assert error.value.param in settings


def test_without_the_package_for_it_nothing_is_sealed_and_an_engine_without_a_store_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(InvalidRequest, match="prefix_cache: needs the package cryptography"):
        build_engine(demo_path(), EngineConfig(prefix_cache="memory", **SETTINGS))
    assert build_engine(demo_path(), EngineConfig(**SETTINGS)).prefix_stats() is None


@pytest.mark.parametrize("wire", ["int8", "float16"])
def test_what_rounding_costs_is_measured_before_it_is_done(wire: str) -> None:
    """Rounding to int8 costs more than to fp16, and both are reported; bf16's exponent fits no fp16 where a model needs
    it.
    """
    engine = Engine(demo_path(), prefix_cache="memory", prefix_wire=wire, **SETTINGS)
    told = engine.choices["prefix_store"]
    [nats] = re.findall(rf"rounded to {wire}: ([0-9.e+-]+) nats a token", told)
    assert -1e-6 < float(nats) <= rounding_trial.MAX_DIVERGENCE_NATS
    if wire == "int8":
        assert float(nats) > 1e-6, "it is not nothing"
    engine._built.close()


def test_rounding_that_costs_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def coarse(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.float().abs().amax(-1) / 2
        return (x.float() / scale[..., None].clamp(1e-9)).round().to(torch.int8), scale

    monkeypatch.setattr(host_kv, "quantize_int8", coarse)
    with pytest.raises(InvalidRequest, match="prefix_wire: int8 changes this model's tokens by") as e:
        build_engine(demo_path(), EngineConfig(prefix_cache="memory", prefix_wire="int8", **SETTINGS))
    assert e.value.param == "prefix_wire"


def test_kv_beyond_the_records_range_is_computed_and_not_stored(tmp_path: Any) -> None:
    """Values of one layer that float16 has no room for: the answer is right, nothing is written, and that is told."""
    folder = build_checkpoint(tmp_path / "loud", "llama", num_hidden_layers=2)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 1e8
    tensors["model.layers.1.self_attn.o_proj.weight"] *= 1e-8
    save_file(tensors, folder / "model.safetensors")
    loud = load_model(folder, LateOps())
    expected = run(make(loud, "cpu", None, blocks=64))
    store = MemoryPrefixStore(2**22, Clock())
    core = make(loud, "cpu", store, wire="float16")
    assert run(core) == expected
    settle(core)
    told = core.scheduler.prefixes.stats(store.stats())
    assert (told.saved, told.store.stored, told.store.values) == (0, 0, 0)
    assert told.store.dropped["range"] > 0
    quiet = make(loud, "cpu", store, wire="bfloat16")
    run(quiet)
    settle(quiet)
    assert store.stats().stored > 0
    assert "range" not in quiet.scheduler.prefixes.stats(store.stats()).store.dropped


def test_a_wire_without_room_for_the_models_kv_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_kv.HostKv, "pack", lambda *given: False)
    with pytest.raises(InvalidRequest, match="prefix_wire: float16 has no room for this model's KV; expected another"):
        build_engine(demo_path(), EngineConfig(prefix_cache="memory", prefix_wire="float16", **SETTINGS))
