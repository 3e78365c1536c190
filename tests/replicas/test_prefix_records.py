"""Records of KV: sealed, alike whoever writes them, and opened by nobody but those who may."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from motley.kernels.cpu.cpu_ops import CpuOps
from motley.kernels.device.device_context import interpreter_context
from motley.kernels.gpu.gpu_ops import GpuOps
from motley.kernels.ops import Ops
from motley.replicas.execution.copier import CpuCopier
from motley.replicas.execution.step_plan import StepPlan
from motley.replicas.execution.swapper import Swapper
from motley.replicas.kv.blocks import chain_hash, root_hash
from motley.replicas.kv.store.host_kv import HostKv, RecordPayloads
from motley.replicas.kv.store.memory_store import MemoryPrefixStore
from motley.replicas.kv.store.prefix_store import ValueQuery
from motley.replicas.kv.store.sealed_record import HEADER_BYTES, Geometry, RecordFlaw, RecordSealer
from motley.replicas.kv.store.store_keys import StoreKeys, kv_identity, with_value_tokens

SMALL = Geometry("float16", 2, 4, 8, 16)
SECRET, KEY = bytes(range(32)), b"k" * 32


def payloads(geometry: Geometry, seed: int = 0) -> list[bytes]:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (geometry.heads, geometry.payload_bytes), dtype=torch.uint8, generator=generator)
    return [bytes(row.tolist()) for row in bits]


def record(seal: RecordSealer, key: bytes = KEY) -> bytes:
    header = seal.header()
    return header + seal.seal(key, header, payloads(seal.geometry))


def opened(
    seal: RecordSealer, key: bytes, *value: bytes, first: int = 0, heads: int | None = None
) -> RecordFlaw | list[bytes]:
    count = seal.geometry.heads if heads is None else heads
    payloads = [memoryview(bytearray(seal.geometry.payload_bytes)) for _ in range(count)]
    flaw = seal.open(key, value, payloads, first)
    return [bytes(one) for one in payloads] if flaw is None else flaw


@pytest.fixture(params=["in place", "copied"])
def seal(request: pytest.FixtureRequest) -> RecordSealer:
    """Seal with a `cryptography` that decrypts into a buffer, and with an older one."""
    made = RecordSealer(SECRET, SMALL)
    if request.param == "copied":
        made._in_place = False
    elif not made._in_place:
        pytest.skip("this cryptography copies")
    return made


def test_what_is_sealed_is_opened(seal: RecordSealer) -> None:
    value = record(seal)
    assert len(value) == SMALL.size
    assert opened(seal, KEY, value) == payloads(SMALL)
    assert all(payload not in value for payload in payloads(SMALL)), "at rest it is private"


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, SMALL.size - 1), bit=st.integers(0, 7))
def test_no_bit_can_be_changed(at: int, bit: int) -> None:
    seal = RecordSealer(SECRET, SMALL)
    value = bytearray(record(seal))
    value[at] ^= 1 << bit
    assert opened(seal, KEY, bytes(value)) in set(RecordFlaw)


@given(size=st.integers(0, SMALL.size + 40).filter(lambda size: size != SMALL.size))
def test_no_other_length_is_looked_at(size: int) -> None:
    seal = RecordSealer(SECRET, SMALL)
    assert opened(seal, KEY, record(seal).ljust(size, b"\0")[:size]) is RecordFlaw.SIZE


def test_what_is_not_for_this_key_model_or_secret_is_not_opened(seal: RecordSealer) -> None:
    value = record(seal)
    assert opened(seal, b"l" * 32, value) is RecordFlaw.SEAL
    assert opened(RecordSealer(b"another secret", SMALL), KEY, value) is RecordFlaw.SEAL
    assert opened(seal, KEY, struct.pack("<8sH", b"MOTLEYKV", 2) + value[10:]) is RecordFlaw.VERSION
    assert opened(seal, KEY, b"PICKLE" + value[6:]) is RecordFlaw.MAGIC
    alike = [replace(SMALL, dtype="bfloat16"), replace(SMALL, layers=4, heads=2), replace(SMALL, head_dim=16, tokens=8)]
    for geometry in alike:
        assert geometry.payload_bytes * geometry.heads == SMALL.payload_bytes * SMALL.heads
        assert (
            opened(RecordSealer(SECRET, geometry), KEY, value.ljust(geometry.size, b"\0")[: geometry.size])
            is RecordFlaw.GEOMETRY
        )


def test_heads_cannot_change_places() -> None:
    seal, size = RecordSealer(SECRET, SMALL), SMALL.sealed_bytes
    value = record(seal)
    first, second = value[HEADER_BYTES:][:size], value[HEADER_BYTES + size :][:size]
    swapped = value[:HEADER_BYTES] + second + first + value[HEADER_BYTES + 2 * size :]
    assert opened(seal, KEY, swapped) is RecordFlaw.SEAL
    other = record(seal)
    mixed = value[:HEADER_BYTES] + value[HEADER_BYTES:][:size] + other[HEADER_BYTES + size :]
    assert opened(seal, KEY, mixed) is RecordFlaw.SEAL, "nor can records be mixed"


def test_no_key_and_nonce_come_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same key of the store, same payloads: another record each time."""
    seal, used = RecordSealer(SECRET, SMALL), []

    class Noting:
        def __init__(self, key: bytes) -> None:
            self.key = key

        def encrypt(self, nonce: bytes, data: bytes, bound: bytes) -> bytes:
            used.append((self.key, nonce))
            return bytes(data) + bytes(16)

    monkeypatch.setattr(seal, "_cipher", Noting)
    monkeypatch.setattr(seal, "_in_place", False)
    for _ in range(20):
        record(seal)
        record(seal, b"l" * 32)
    assert len(set(used)) == len(used) == 40 * SMALL.heads


@pytest.mark.parametrize("written_by", [1, 2, 4])
@pytest.mark.parametrize("read_by", [1, 2, 4])
def test_whatever_the_degree_of_tensor_parallelism(written_by: int, read_by: int) -> None:
    """Ranks seal their own heads under one header; ranks of another degree read theirs, and not a byte more."""
    seal, plain = RecordSealer(SECRET, SMALL), payloads(SMALL)
    header, share = seal.header(), SMALL.heads // written_by
    store = MemoryPrefixStore(2**20)
    store.put(KEY, [header, *[seal.seal(KEY, header, plain[i : i + share], i) for i in range(0, 4, share)]], "")
    share = SMALL.heads // read_by
    for first in range(0, SMALL.heads, share):
        wanted = SMALL.wanted(KEY, range(first, first + share))
        assert wanted.num_bytes == HEADER_BYTES + share * SMALL.sealed_bytes
        [found] = store.get([wanted], 1e18)
        assert found is not None
        assert opened(seal, KEY, *map(bytes, found), first=first, heads=share) == plain[first : first + share]


@pytest.mark.parametrize(
    ("shape", "tokens", "mib"),
    [
        (("bfloat16", 24, 2, 64), 128, 1.5),  # Qwen2.5-0.5B
        (("float16", 28, 4, 128), 32, 1.75),  # Qwen2.5-7B
        (("bfloat16", 32, 8, 128), 16, 2.0),  # Llama-3.1-8B
        (("bfloat16", 80, 8, 128), 16, 5.0),  # a block is the least
        (("bfloat16", 6, 2, 64), 128, 0.375),
    ],
)
def test_a_value_has_one_to_two_mebibytes_where_it_can(shape: tuple[Any, ...], tokens: int, mib: float) -> None:
    geometry = with_value_tokens(Geometry(*shape, 16))
    assert geometry.tokens == tokens
    assert geometry.size == pytest.approx(mib * 2**20, rel=0.01)


def test_keys_tell_everything_apart_that_may_not_meet() -> None:
    base: tuple[Any, ...] = ("model", SMALL, "float16", "cpu-exact")
    others = [
        ("model2", *base[1:]),
        ("model", replace(SMALL, dtype="int8"), *base[2:]),
        (*base[:2], "bfloat16", "cpu-exact"),
        (*base[:3], "cpu-fast"),
        (*base[:3], None),
        (*base[:3], "any"),
    ]
    hashes = [chain_hash(root_hash(b"one"), range(16)), chain_hash(root_hash(b"two"), range(16))]
    keys = [StoreKeys(SECRET, kv_identity(*of)) for of in (base, *others)] + [StoreKeys(b"s" * 32, kv_identity(*base))]
    found = [value.key for each in keys for value in each.values(hashes, 1)]
    assert len(set(found)) == len(found) == 16
    assert all(len(key) == 32 for key in found)
    assert [len(keys[0].values([b"h"] * n, 4)) for n in (3, 4, 9)] == [0, 1, 2]


def swapper(ops: Ops, kv: list[torch.Tensor], blocks: int) -> Swapper:
    return Swapper([part for cache in kv for part in ops.kv_parts(cache)], CpuCopier(), blocks)


CPU = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("small_slabs", [False, True])
def test_payloads_are_alike_whatever_the_layout_on_the_device(
    dtype: str, small_slabs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[layer, K/V, token, head dim] of each head, of a CPU's blocks and a GPU's; each reads what the other wrote."""
    if small_slabs:
        monkeypatch.setattr("motley.replicas.execution.swapper.SLAB_BYTES", 2**14)
    layers, heads, dim, blocks = 3, 2, 64, 6
    kv_dtype = "int8" if dtype == "int8" else None
    cpu = CpuOps(CPU.get(dtype, torch.float32), "exact", None, None, "tests", kv_dtype)
    gpu = GpuOps(interpreter_context((8, 0)), kv_dtype)
    kvs = [ops.allocate_kv(layers, blocks, heads, dim) for ops in (cpu, gpu)]
    if dtype != "int8":
        kvs[1] = [cache.to(CPU[dtype]) for cache in kvs[1]]
    vectors = [[ops.kv_vectors(ops.kv_parts(cache)) for cache in kv] for ops, kv in zip((cpu, gpu), kvs, strict=True)]
    for views in vectors[0]:
        for view in views:
            view.copy_(torch.randn(view.shape) * 40)
    geometry = Geometry(dtype, layers, heads, dim, 32)
    swappers = [swapper(ops, kv, 20) for ops, kv in zip((cpu, gpu), kvs, strict=True)]
    hosts = [HostKv(one.slabs(), ops.kv_vectors, geometry) for one, ops in zip(swappers, (cpu, gpu), strict=True)]
    swappers[0].swap(StepPlan((), swap_out=((4, 17), (1, 3))))
    payloads = hosts[0].allocate_payloads()
    assert hosts[0].pack((17, 3), payloads)
    for head in range(heads):
        each = [torch.cat([one[kv][block, head] for block in (4, 1)]) for one in vectors[0] for kv in (0, 1)]
        expected = torch.stack(each).view(torch.uint8).flatten().tolist()
        assert list(payloads.buffers[head])[: geometry.number_bytes] == expected
    hosts[1].unpack(payloads, (0, 19))
    swappers[1].swap(StepPlan((), swap_in=((5, 0), (2, 19))))
    for ours, theirs in zip(*vectors, strict=True):
        for here, there in zip(ours, theirs, strict=True):
            assert torch.equal(there[[5, 2]], here[[4, 1]])
            assert not there[[0, 1, 3, 4]].any()
    again = RecordPayloads(geometry, heads)
    assert hosts[1].pack((0, 19), again)
    assert list(map(bytes, again.buffers)) == list(map(bytes, payloads.buffers))


@pytest.mark.parametrize(("wire", "bound"), [("int8", 1 / 254), ("bfloat16", 2**-8), ("float16", 2**-11)])
def test_rounded_records_are_as_near_as_they_say(wire: str, bound: float) -> None:
    """Values in int8 are within half a step of a vector's own scale."""
    ops = CpuOps(torch.float32, "exact", None, None, "tests")
    kv = ops.allocate_kv(2, 2, 2, 32)
    for cache in kv:
        cache.normal_()
    one = swapper(ops, kv, 4)
    host = HostKv(one.slabs(), ops.kv_vectors, Geometry(wire, 2, 2, 32, 16))
    payloads = host.allocate_payloads()
    one.swap(StepPlan((), swap_out=((0, 1),)))
    assert host.pack((1,), payloads)
    host.unpack(payloads, (2,))
    one.swap(StepPlan((), swap_in=((1, 2),)))
    for cache in kv:
        for vectors in ops.kv_vectors((cache,)):
            largest = vectors[0].abs().amax(-1, keepdim=True)
            assert ((vectors[1] - vectors[0]).abs() <= bound * largest * 1.001).all()
            assert not torch.equal(vectors[1], vectors[0])


@pytest.mark.parametrize(("wire", "value"), [("float32", torch.nan), ("float16", 1e6), ("int8", torch.inf)])
def test_what_is_not_finite_is_not_stored(wire: str, value: float) -> None:
    ops = CpuOps(torch.float32, "exact", None, None, "tests")
    kv = ops.allocate_kv(2, 1, 2, 32)
    one = swapper(ops, kv, 1)
    host = HostKv(one.slabs(), ops.kv_vectors, Geometry(wire, 2, 2, 32, 16))
    one.swap(StepPlan((), swap_out=((0, 0),)))
    assert host.pack((0,), host.allocate_payloads())
    ops.kv_vectors((kv[1],))[1][0, 1, 7, 3] = value
    one.swap(StepPlan((), swap_out=((0, 0),)))
    assert not host.pack((0,), host.allocate_payloads())


STORE_STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "known", "forget"]), st.integers(0, 5), st.integers(1, 40)), max_size=40
)


@settings(max_examples=100, deadline=None)
@given(steps=STORE_STEPS)
def test_the_hosts_store_keeps_what_was_used_last(steps: list[tuple[str, int, int]]) -> None:
    store, held = MemoryPrefixStore(100), {}
    for what, number, size in steps:
        key, owner = bytes([number]), str(number % 2)
        if what == "put":
            assert store.put(key, [bytes(size - 1), b"x"], owner)
            held.pop(key, None)
            held[key] = size
            while sum(held.values()) > 100:
                held.pop(next(iter(held)))
        elif what == "get":
            keys = [bytes([number]), bytes([(number + 1) % 6])]
            found = store.get([ValueQuery(one, held.get(one, 7)) for one in keys], 1e18)
            leading = 0 if keys[0] not in held else 1 if keys[1] not in held else 2
            assert [value is not None for value in found] == [i < leading for i in range(2)]
            for one in keys[:leading]:
                held[one] = held.pop(one)
        elif what == "known":
            keys = [bytes([i]) for i in range(number + 1)]
            leading = next((i for i in range(number + 1) if keys[i] not in held), number + 1)
            assert store.count_stored([ValueQuery(one, held.get(one, 7)) for one in keys], "", 1e18) == leading
        else:
            store.forget(owner)
            held = {one: size for one, size in held.items() if str(one[0] % 2) != owner}
        stats = store.stats()
        assert (stats.values, stats.nbytes) == (len(held), sum(held.values()))


def test_the_hosts_store_refuses_and_counts() -> None:
    store = MemoryPrefixStore(100)
    assert not store.put(b"k", [bytes(101)], "")
    assert store.put(b"k", [bytes(50)], "")
    assert store.get([ValueQuery(b"k", 51)], 1e18) == [None]
    assert store.get([ValueQuery(b"k", 50)], 0.0) == [None], "too late"
    assert [store.count_stored([ValueQuery(b"k", size)], "", 1e18) for size in (50, 51)] == [1, 0]
    store.close()
    assert not store.put(b"k", [b"x"], "")
    assert store.count_stored([ValueQuery(b"k", 50)], "", 1e18) == 0
    stats = store.stats()
    assert (stats.hits, stats.misses, dict(stats.errors)) == (0, 2, {"size": 1})
    assert dict(stats.dropped) == {"too_large": 1, "closed": 1}
