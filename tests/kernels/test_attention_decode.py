"""Attention of one new token over paged KV against fp64, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged import guarded

from motley.kernels.attention.attention_decode import Kernel, decode_attention
from motley.kernels.attention.attention_tile import AttentionSpec
from motley.kernels.attention.paged_batch import PagedBatch, attention_error
from motley.kernels.launch.variant import Config

# Products of halves are those of tensor cores; of bf16 the interpreter can form none by itself.
PACKED = {wide: Config.of(4, 1, BLOCK=32, SPLITS=1, WIDE=wide) for wide in (False, True)}
KERNELS: tuple[Kernel, ...] = ("packed GQA", "per head")
LENGTHS = [70, 1, 0, 33]


def spans(lengths: list[int]) -> list[tuple[int, int]]:
    return [(length - 1, 1) for length in lengths]


def config_of(kernel: Kernel, dtype: str, splits: int = 1, heads: int = 1) -> Config:
    if kernel == "packed GQA":
        return Config.of(4, 1, BLOCK=32, SPLITS=splits, WIDE=dtype != "fp16")
    return Config.of(4, 1, HEADS=heads, ROWS=8, UNROLL=2, SPLITS=splits)


def run(batch: PagedBatch, kernel: Kernel, config: Config) -> torch.Tensor:
    return decode_attention(
        batch.q, batch.cache, batch.block_tables, batch.context_lens, batch.scale, batch.window, kernel, config
    )


def check(batch: PagedBatch, kernel: Kernel, config: Config) -> torch.Tensor:
    """Within rounding, and zeros where there is no context."""
    found = run(batch, kernel, config)
    wide = kernel == "per head" or config["WIDE"]
    assert attention_error(batch, found, wide=wide) <= 1
    assert not found[batch.context_lens == 0].any()
    return found


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("kv", ["same", "i8"])
@pytest.mark.parametrize("splits", [1, 4])
def test_every_dtype(kernel: Kernel, dtype: str, kv: str, splits: int) -> None:
    cache = ("fp16" if dtype == "fp32" else dtype) if kv == "same" else "i8"
    check(guarded(AttentionSpec(dtype, cache, 4, 2, 64), spans(LENGTHS)), kernel, config_of(kernel, dtype, splits, 2))


@pytest.mark.parametrize("kv", ["bf16", "i8"])
@pytest.mark.parametrize("splits", [1, 4])
def test_products_of_bf16(kv: str, splits: int, bf16_widened: None) -> None:
    config = Config.of(4, 1, BLOCK=32, SPLITS=splits, WIDE=False)
    check(guarded(AttentionSpec("bf16", kv, 4, 2, 64), spans(LENGTHS)), "packed GQA", config)
    check(guarded(AttentionSpec("bf16", kv, 3, 1, 80, True), spans([75, 17]), 33), "packed GQA", config)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "together"), [
    (14, 2, 64, 7), (3, 3, 80, 1), (2, 1, 96, 2), (8, 1, 128, 4), (6, 2, 128, 3), (2, 2, 256, 1), (20, 1, 64, 5),
])  # fmt: skip
def test_every_head_dim_and_group(kernel: Kernel, heads: int, kv_heads: int, dim: int, together: int) -> None:
    batch = guarded(AttentionSpec("fp16", "fp16", heads, kv_heads, dim), spans([40, 7]))
    check(batch, kernel, config_of(kernel, "fp16", 2, together))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [1, 33, 1000])
def test_windows(kernel: Kernel, splits: int, window: int) -> None:
    """Tokens before a window are NaN here: they are not read."""
    batch = guarded(AttentionSpec("fp16", "fp16", 4, 2, 64, True), spans([75, 0, 17]), window)
    check(batch, kernel, config_of(kernel, "fp16", splits, 2))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("length", [16, 17, 32, 33, 64, 65, 128, 129])
def test_every_edge_of_blocks_steps_and_splits(kernel: Kernel, length: int) -> None:
    check(guarded(AttentionSpec("fp16", "fp16", 2, 1, 64), spans([length])), kernel, config_of(kernel, "fp16", 4, 2))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("splits", [1, 4])
def test_bits_are_those_without_the_rest_of_the_batch(kernel: Kernel, splits: int) -> None:
    batch = guarded(AttentionSpec("fp16", "fp16", 4, 2, 64), spans([70, 3, 0]))
    together = run(batch, kernel, config_of(kernel, "fp16", splits, 2))
    for sequence in range(3):
        only = slice(sequence, sequence + 1)
        alone = replace(batch, q=batch.q[only], block_tables=batch.block_tables[only], spans=batch.spans[only])
        assert torch.equal(run(alone, kernel, config_of(kernel, "fp16", splits, 2)), together[only])


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_loud_key_takes_all_weight(kernel: Kernel) -> None:
    """Highest scores that rise late and far: what came before must fade without an overflow."""
    batch = guarded(AttentionSpec("fp16", "fp16", 2, 2, 64), spans([90]))
    block, offset = batch.cells(0)
    batch.cache.data[0, block[70], :, offset[70]] = batch.q[0] * 100
    found = check(batch, kernel, config_of(kernel, "fp16", 2))
    assert torch.equal(found[0], batch.cache.data[1, block[70], :, offset[70]])


def test_weak_weights_survive_fp16() -> None:
    """One key in 200 has e**16 times the weight of each other, and a value of 0: in fp16 as they are, the others'
    weights would be two of the smallest numbers there are, and 6% too large.
    """
    batch = guarded(AttentionSpec("fp16", "fp16", 1, 1, 64), spans([200]))
    block, offset = batch.cells(0)
    query = batch.q[0, 0].float()
    keys, values = batch.cache.data
    keys[block, 0, offset] = 0
    keys[block[5], 0, offset[5]] = (query * 16 / (batch.scale * query.square().sum())).half()
    values[block, 0, offset] *= 1000
    values[block[5], 0, offset[5]] = 0
    check(batch, "packed GQA", PACKED[False])


@pytest.mark.parametrize("kernel", KERNELS)
def test_splits_are_of_what_the_window_sees(kernel: Kernel) -> None:
    """640 tokens before the window change no bit: neither are they walked over, nor does the cut begin at them."""
    batch = guarded(AttentionSpec("fp16", "fp16", 2, 1, 64, True), spans([70, 710]), 60)
    short, long = batch.cells(0), batch.cells(1)
    batch.cache.data[:, long[0][650:], :, long[1][650:]] = batch.cache.data[:, short[0][10:], :, short[1][10:]]
    batch.q[1] = batch.q[0]
    found = check(batch, kernel, config_of(kernel, "fp16", 4, 2))
    assert torch.equal(found[0], found[1])


def test_what_the_kernels_cannot_read_is_refused() -> None:
    batch = guarded(AttentionSpec("fp16", "fp16", 4, 2, 64), spans([5]))
    config = config_of("per head", "fp16", heads=2)
    with pytest.raises(ValueError, match="HEADS: 3"):
        run(batch, "per head", Config.of(4, 1, HEADS=3, ROWS=8, UNROLL=2, SPLITS=1))
    with pytest.raises(ValueError, match="head_dim"):
        run(replace(batch, q=batch.q[..., :32].contiguous()), "per head", config)
    with pytest.raises(ValueError, match="3 is not a multiple of the 2 KV heads"):
        run(replace(batch, q=batch.q[:, :3].contiguous()), "per head", config)
    with pytest.raises(ValueError, match="window: 0"):
        run(replace(batch, window=0), "per head", config)
    with pytest.raises(ValueError, match="contiguous"):
        run(replace(batch, q=batch.q.transpose(1, 2).contiguous().transpose(1, 2)), "per head", config)
