"""Paged attention against the plain reference, and the same bits however a sequence is cut."""

import dataclasses
import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_batches import block_tables, step_batch

from motley.kernels import reference
from motley.kernels.cpu import torch_attention as cpu_attention
from motley.kernels.cpu.c_kernels import native_kernels as cpu_native
from motley.kernels.cpu.cpu_ops import CpuOps

NATIVE, REASON = cpu_native.load_native_kernels()
needs_native = pytest.mark.skipif(NATIVE is None, reason=REASON)
KERNELS = [pytest.param(NATIVE, marks=needs_native, id="c"), pytest.param(None, id="torch")]
SPANS = [[(0, 1)], [(16, 1), (3, 1), (90, 1)], [(0, 37)], [(40, 1), (7, 1), (20, 33), (0, 5)], [(130, 150)]]
HEADS = [(4, 4, 8), (14, 2, 64), (6, 3, 40), (8, 1, 128), (2, 2, 96)]
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def cpu(native, dtype=torch.float32, kv_dtype=None):
    return CpuOps(dtype, "exact", None, native, "test", kv_dtype)


def written(device_ops, k, v, tables, heads):
    """A cache that holds k, v [S][L, KH, D] in the blocks of `tables`, and NaN wherever nothing was written."""
    (cache,) = device_ops.allocate_kv(1, int(tables.max()) + 4, k[0].shape[1], k[0].shape[2])
    (cpu_attention.scale_view(cache) if cache.dtype == torch.int8 else cache).fill_(float("nan"))
    batch = step_batch([(0, len(rows)) for rows in k], tables)
    device_ops.write_kv(torch.cat(k), torch.cat(v), cache, batch)
    return cache


@pytest.mark.parametrize("native", KERNELS)
@pytest.mark.parametrize("spans", SPANS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 19, 1])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_matches_reference(native, spans, heads, window, dtype):
    num_heads, num_kv_heads, head_dim = heads
    rng = torch.Generator().manual_seed(0)
    device_ops, scale = cpu(native, dtype), head_dim**-0.5
    lengths = [before + new for before, new in spans]
    k, v = ([torch.randn(n, num_kv_heads, head_dim, generator=rng).to(dtype) for n in lengths] for _ in range(2))
    tables = block_tables(lengths, rng)
    batch = step_batch(spans, tables)
    q = torch.randn(batch.num_tokens, num_heads, head_dim, generator=rng).to(dtype)

    got = device_ops.attention(q, written(device_ops, k, v, tables, heads), batch, scale, window)
    for index in range(len(spans)):
        rows = slice(batch.query_starts[index], batch.query_starts[index + 1])
        want = reference.attention(q[rows], k[index], v[index], batch.positions[rows], scale, window)
        torch.testing.assert_close(got[rows], want, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])


@pytest.mark.parametrize("native", KERNELS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("heads", [(14, 2, 64), (3, 3, 16)], ids=str)
@settings(max_examples=20)
@given(
    length=st.integers(1, 200),
    window=st.sampled_from([None, 1, 30, 100]),
    cuts=st.lists(st.integers(1, 199), max_size=4, unique=True),
    neighbours=st.lists(st.tuples(st.integers(0, 90), st.integers(2, 40)), max_size=2),
    loud=st.booleans(),
    kv_dtype=st.sampled_from([None, "int8"]),
)
def test_same_bits_however_it_is_cut(native, dtype, heads, length, window, cuts, neighbours, loud, kv_dtype):
    """One chunk alone, against any chunks, decodes among them, beside other sequences with outliers."""
    num_heads, num_kv_heads, head_dim = heads
    rng = torch.Generator().manual_seed(length)
    device_ops, scale = cpu(native, dtype, kv_dtype), head_dim**-0.5
    lengths = [length, *(before + new for before, new in neighbours)]
    k, v = ([torch.randn(n, num_kv_heads, head_dim, generator=rng).to(dtype) for n in lengths] for _ in range(2))
    q = torch.randn(length, num_heads, head_dim, generator=rng).to(dtype)
    alone = block_tables([length], rng)
    whole = device_ops.attention(
        q, written(device_ops, k[:1], v[:1], alone, heads), step_batch([(0, length)], alone), scale, window
    )

    tables = block_tables(lengths, rng)
    if loud:
        k, v = ([rows if index == 0 else rows * 1e4 for index, rows in enumerate(each)] for each in (k, v))
    cache = written(device_ops, k, v, tables, heads)
    borders = sorted({0, length, *(cut for cut in cuts if cut < length)})
    for start, end in itertools.pairwise(borders):
        batch = step_batch([(start, end - start), *neighbours], tables)
        others = torch.randn(batch.num_tokens - (end - start), num_heads, head_dim, generator=rng).to(dtype)
        got = device_ops.attention(torch.cat((q[start:end], others)), cache, batch, scale, window)
        assert torch.equal(got[: end - start], whole[start:end])


@needs_native
@pytest.mark.parametrize("spans", [[(100, 1)], [(30, 1), (0, 50)]], ids=str)
def test_same_bits_for_any_number_of_threads(spans):
    rng, outputs = torch.Generator().manual_seed(0), []
    lengths = [before + new for before, new in spans]
    k, v = ([torch.randn(n, 2, 32, generator=rng) for n in lengths] for _ in range(2))
    tables = block_tables(lengths, rng)
    q = torch.randn(sum(new for _, new in spans), 14, 32, generator=rng)
    for threads in (1, 2, 7):
        native, _ = cpu_native.load_native_kernels()
        native.threads = threads
        device_ops = cpu(native)
        cache = written(device_ops, k, v, tables, None)
        outputs.append(device_ops.attention(q, cache, step_batch(spans, tables), 0.2, None))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("native", KERNELS)
def test_a_bad_key_stays_visible_and_in_its_sequence(native):
    rng = torch.Generator().manual_seed(0)
    k, v = ([torch.randn(n, 1, 16, generator=rng) for n in (40, 40)] for _ in range(2))
    k[0][20] = float("nan")
    tables = block_tables([40, 40], rng)
    device_ops = cpu(native)
    got = device_ops.attention(
        torch.randn(80, 2, 16, generator=rng),
        written(device_ops, k, v, tables, None),
        step_batch([(0, 40), (0, 40)], tables),
        0.25,
        None,
    )
    assert got[:20].isfinite().all()
    assert got[20:40].isnan().all()
    assert got[40:].isfinite().all()


@pytest.mark.parametrize("native", KERNELS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 19])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_int8_is_attended_as_it_is_read(native, heads, window, dtype):
    """Rotated and written by one pass, then prefill beside a decode: no rounding but that of the vectors."""
    num_heads, num_kv_heads, head_dim = heads
    rng, scale = torch.Generator().manual_seed(0), head_dim**-0.5
    device_ops, spans = cpu(native, dtype, "int8"), [(0, 37), (0, 90)]
    tables = block_tables([37, 90], rng)
    (cache,) = device_ops.allocate_kv(1, int(tables.max()) + 1, num_kv_heads, head_dim)
    assert cache.nbytes == cache.shape[0] * 2 * num_kv_heads * 16 * (head_dim + 4)
    cpu_attention.scale_view(cache).fill_(float("nan"))
    batch = step_batch(spans, tables)
    q, k, v = (torch.randn(127, n, head_dim, generator=rng).to(dtype) for n in (num_heads, num_kv_heads, num_kv_heads))
    angles = torch.rand(127, head_dim // 2, generator=rng) * 6
    turned = device_ops.rotary_write(q, k, v, angles.cos(), angles.sin(), cache, batch)
    want_k = reference.rotary(q, k.float(), angles.cos(), angles.sin())[1]
    for (before, new), table, start in zip(spans, tables, batch.query_starts, strict=False):
        rows = slice(start, start + new)
        blocks = table[: -(-(before + new) // 16)]
        found = cpu_attention.read_cache(cache, blocks, new)
        for got, want in zip(found, (want_k[rows], v[rows].float()), strict=True):
            bound = want.abs().amax(-1, keepdim=True) * (1 / 254 + 2 * BOUNDS[dtype])
            assert ((got - want).abs() <= bound).all()
        step = step_batch([(0, new)], table[None])
        got = device_ops.attention(turned[rows], cache, step, scale, window)
        want = reference.attention(turned[rows].float(), *found, step.positions, scale, window)
        torch.testing.assert_close(got.float(), want, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])


@pytest.mark.parametrize("native", KERNELS)
def test_int8_of_zeros_of_one_value_of_halves_and_of_what_is_not_finite(native):
    """Rounds as the kernels of GPUs do: see test_rotary.py."""
    v = torch.zeros(6, 1, 32)
    v[1, 0, 5] = -3.0
    v[2, 0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    v[3, 0, 1], v[4, 0, 2] = torch.inf, torch.nan
    device_ops, table = cpu(native, kv_dtype="int8"), torch.zeros(1, 1, dtype=torch.int32)
    (cache,) = device_ops.allocate_kv(1, 1, 1, 32)
    still = torch.ones(6, 16), torch.zeros(6, 16)
    device_ops.rotary_write(v, v, v, *still, cache, step_batch([(0, 6)], table))
    for codes in (cpu_attention.key_view(cache)[0, 0].T, cpu_attention.value_view(cache)[0, 0]):
        assert codes[0].tolist() == [0] * 32
        assert codes[1].tolist() == [0] * 5 + [-127] + [0] * 26
        assert codes[2, :4].tolist() == [127, 0, 2, -2]
        assert not codes[3:5].any()
    for scales in cpu_attention.scale_view(cache)[0, :, 0]:
        assert scales[:3].tolist() == [0, float(torch.tensor(3.0) / 127), 1]
        assert scales[3:5].isnan().all()
        assert scales[5] == 0


def test_read_gives_back_what_was_written():
    rng = torch.Generator().manual_seed(0)
    k, v = ([torch.randn(37, 2, 8, generator=rng)] for _ in range(2))
    tables = block_tables([37], rng)
    back = cpu_attention.read_cache(written(cpu(None), k, v, tables, None), tables[0], 37)
    assert torch.equal(back[0], k[0])
    assert torch.equal(back[1], v[0])


def test_operators_that_engines_share_hand_each_batch_its_own_tiles() -> None:
    """Two engines' threads: with the other's tiles the kernel reads past the block table."""

    class Told:
        def attention(self, q, cache, batch, tiles, scale, window):
            return int(tiles.spans[:, 2].sum()) == batch.query_starts[-1]

    class Pauses(tuple):
        def __del__(self):  # of a step before: where memory goes, another thread may run
            time.sleep(0)

    ops = cpu(Told())

    def steps(length: int) -> bool:
        q, cache = torch.zeros(length, 1, 16), torch.zeros(1, 2, 1, 256)
        batch = step_batch([(0, length)], torch.zeros(1, 3, dtype=torch.int32))
        one_by_one = (dataclasses.replace(batch, context_lens=Pauses((length,))) for _ in range(300))
        return all(ops.attention(q, cache, each, 1.0, None) for each in one_by_one)

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(steps, (1, 33)))
