"""Norms, rotary with the KV write, and the MLP's gate against the plain reference."""

import pytest
import torch
from step_batches import block_tables, step_batch

from motley.kernels import reference
from motley.kernels.cpu import torch_attention as cpu_attention
from motley.kernels.cpu.c_kernels import native_kernels as cpu_native
from motley.kernels.cpu.cpu_ops import CpuOps

NATIVE, REASON = cpu_native.load_native_kernels()
KERNELS = [
    pytest.param(NATIVE, marks=pytest.mark.skipif(NATIVE is None, reason=REASON), id="c"),
    pytest.param(None, id="torch"),
]
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


@pytest.fixture(params=KERNELS)
def native(request):
    return request.param


@pytest.fixture(params=BOUNDS, ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def device_ops(native, dtype):
    return CpuOps(dtype, "exact", None, native, "test")


def close(got, want, dtype):
    assert got.dtype == want.dtype == dtype
    torch.testing.assert_close(got, want, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])


@pytest.mark.parametrize("shape", [(1, 64), (3, 896), (20, 100), (5, 4, 16), (2, 3, 24)], ids=str)
def test_rms_norm(device_ops, dtype, shape):
    x, weight = torch.randn(shape).to(dtype) * 3, torch.rand(shape[-1]).to(dtype)
    close(device_ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), dtype)


@pytest.mark.parametrize("shape", [(1, 64), (9, 100)], ids=str)
def test_add_rms_norm(device_ops, dtype, shape):
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.rand(shape[1]).to(dtype)
    normed, total = device_ops.add_rms_norm(x, residual, weight, 1e-5)
    want, want_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, want_total)
    close(normed, want, dtype)


@pytest.mark.parametrize("shape", [(1, 32), (9, 100), (2, 9728)], ids=str)
def test_silu_mul(device_ops, dtype, shape):
    gate_up = (torch.randn(shape) * 10).to(dtype)
    close(device_ops.silu_mul(gate_up), reference.silu_mul(gate_up), dtype)


def test_silu_mul_at_the_ends(device_ops, dtype):
    gates = torch.tensor([-1e4, -200.0, -90.0, 0.0, 90.0, 1e4])
    got = device_ops.silu_mul(torch.cat((gates, torch.ones(6)))[None].to(dtype))
    close(got, reference.silu_mul(torch.cat((gates, torch.ones(6)))[None].to(dtype)), dtype)


@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 3, 10)], ids=str)
@pytest.mark.parametrize("tokens", [1, 21])
def test_rotary_write(device_ops, dtype, heads, tokens):
    num_heads, num_kv_heads, head_dim = heads
    joined = torch.randn(tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    q, k, v = joined.split([num_heads, num_kv_heads, num_kv_heads], dim=1)  # views, as the model has them
    angles = torch.rand(tokens, head_dim // 2) * 6
    tables = block_tables([tokens], torch.Generator().manual_seed(0))
    (cache,) = device_ops.allocate_kv(1, int(tables.max()) + 1, num_kv_heads, head_dim)
    got = device_ops.rotary_write(q, k, v, angles.cos(), angles.sin(), cache, step_batch([(0, tokens)], tables))
    want_q, want_k = reference.rotary(q, k, angles.cos(), angles.sin())
    cached_k, cached_v = cpu_attention.read_cache(cache, tables[0], tokens)
    close(got, want_q, dtype)
    close(cached_k, want_k, dtype)
    assert torch.equal(cached_v, v)


def test_not_a_number_stays_one(device_ops, dtype):
    x = torch.ones(2, 64, dtype=dtype)
    x[1, 5] = float("nan")
    assert device_ops.rms_norm(x, torch.ones(64, dtype=dtype), 1e-6)[1].isnan().all()
    assert device_ops.silu_mul(x)[1, 5].isnan()
