"""Attention of new tokens, any number in each sequence, over paged KV against fp64, in Triton's interpreter."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from paged import guarded

from motley.kernels import reference
from motley.kernels.attention.attention_operations import PREFILL
from motley.kernels.attention.attention_prefill import prefill_attention
from motley.kernels.attention.attention_tile import AttentionSpec
from motley.kernels.attention.paged_batch import PagedBatch, attention_error, expected_attention
from motley.kernels.device.compute_capability import CAPABILITIES
from motley.kernels.device.precision import policy_of
from motley.kernels.launch.kernel_operation import ProblemShape
from motley.kernels.launch.variant import Config

# Chunks, first and later ones, decodes, a padded row, and a sequence with nothing new.
SPANS = [(0, 37), (40, 1), (50, 13), (-1, 1), (20, 0), (0, 1), (31, 2)]


def config_of(dtype: str = "fp16", rows: int = 32, block: int = 32) -> Config:
    """Products of halves are those of tensor cores; of bf16 the interpreter can form none by itself."""
    return Config.of(4, 1, ROWS=rows, BLOCK=block, WIDE=dtype != "fp16")


def run(batch: PagedBatch, config: Config) -> torch.Tensor:
    longest = max(new for _, new in batch.spans)
    return prefill_attention(
        batch.q, batch.cache, batch.block_tables, batch.query_starts, batch.context_lens, longest, batch.scale,
        batch.window, config, out=torch.full_like(batch.q, torch.nan),
    )  # fmt: skip


def check(batch: PagedBatch, config: Config) -> torch.Tensor:
    found = run(batch, config)
    assert attention_error(batch, found, wide=config["WIDE"]) <= 1
    for sequence, (before, _) in enumerate(batch.spans):
        if before < 0:
            assert not found[batch.starts[sequence] : batch.starts[sequence + 1]].any()
    return found


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("kv", ["same", "i8"])
def test_every_dtype(dtype: str, kv: str) -> None:
    cache = ("fp16" if dtype == "fp32" else dtype) if kv == "same" else "i8"
    check(guarded(AttentionSpec(dtype, cache, 4, 2, 64), SPANS), config_of(dtype))


@pytest.mark.parametrize("kv", ["bf16", "i8"])
def test_products_of_bf16(kv: str, bf16_widened: None) -> None:
    config = Config.of(4, 1, ROWS=32, BLOCK=32, WIDE=False)
    check(guarded(AttentionSpec("bf16", kv, 4, 2, 64), SPANS), config)
    check(guarded(AttentionSpec("bf16", kv, 3, 1, 80, True), [(97, 40), (0, 5)], 33), config)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [
    (14, 2, 64), (3, 3, 80), (2, 1, 96), (8, 1, 128), (6, 2, 128), (2, 2, 256), (20, 1, 64),
])  # fmt: skip
def test_every_head_dim_and_group(heads: int, kv_heads: int, dim: int) -> None:
    check(guarded(AttentionSpec("fp16", "fp16", heads, kv_heads, dim), [(9, 12), (40, 1)]), config_of())


@pytest.mark.parametrize("window", [1, 33, 1000])
def test_windows(window: int) -> None:
    """Tokens before the windows are NaN here: they are not read."""
    check(guarded(AttentionSpec("fp16", "fp16", 4, 2, 64, True), [*SPANS, (97, 40)], window), config_of())


@pytest.mark.parametrize(("rows", "block"), [(16, 16), (16, 64), (64, 16)])
@pytest.mark.parametrize("window", [None, 20])
def test_every_cut(rows: int, block: int, window: int | None) -> None:
    batch = guarded(AttentionSpec("fp16", "fp16", 3, 1, 64, window is not None), [(0, 65), (70, 1), (15, 33)], window)
    check(batch, config_of(rows=rows, block=block))


@pytest.mark.parametrize("window", [None, 20])
def test_bits_are_those_of_the_sequence_alone_in_other_chunks(window: int | None, rows_alike: None) -> None:
    heads = AttentionSpec("fp16", "fp16", 2, 1, 64, window is not None)
    batch = guarded(heads, [(0, 70), (30, 5)], window)
    whole = run(batch, config_of())[:70]
    for spans in ([(0, 70)], [(0, 1)], [(0, 33)], [(33, 37)], [(69, 1)]):
        [(before, new)] = spans
        chunk = replace(
            batch, q=batch.q[before : before + new], block_tables=batch.block_tables[:1], spans=((before, new),)
        )
        assert torch.equal(run(chunk, config_of()), whole[before : before + new])


def test_rows_of_no_sequence_are_left_alone() -> None:
    """Prefills behind the decodes of a step: their part of the tables, over the whole of q."""
    batch = guarded(AttentionSpec("fp16", "fp16", 2, 1, 64), [(20, 1), (8, 1), (0, 12)])
    out = torch.full_like(batch.q, 7)
    prefill_attention(
        batch.q, batch.cache, batch.block_tables[2:], batch.query_starts[2:], batch.context_lens[2:], 12, batch.scale,
        None, config_of(), out=out,
    )  # fmt: skip
    assert torch.equal(out[2:], run(batch, config_of())[2:])
    assert (out[:2] == 7).all()


def test_the_reference_is_that_of_the_whole_sequence() -> None:
    batch = guarded(AttentionSpec("fp16", "fp16", 4, 2, 64), [(0, 20)])
    k, v = batch.keys_values(0)
    whole = reference.attention(batch.q.double(), k, v, torch.arange(20), batch.scale, None)
    torch.testing.assert_close(expected_attention(batch, 0, torch.arange(20)), whole)
    ours = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in (batch.q.double(), k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(ours[0].transpose(0, 1), whole)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(20, 1, 256), (34, 2, 64), (64, 1, 64)])
def test_more_heads_than_rows_go_in_even_parts(heads: int, kv_heads: int, dim: int) -> None:
    """Such as 17 heads one by one, since 17 is prime, and 20 in tens; on 6.x a head of 256 leaves 16 rows."""
    check(guarded(AttentionSpec("fp16", "fp16", heads, kv_heads, dim), [(0, 5), (33, 2)]), config_of(rows=16, block=16))


@pytest.mark.parametrize("version", CAPABILITIES)
def test_every_capability_has_a_launch_for_any_number_of_heads(version: tuple[int, int]) -> None:
    policy = policy_of(*version)
    for dim, group in itertools.product((64, 80, 96, 128, 256), (1, 16, 17, 71, 128)):
        shape = ProblemShape.of(
            batch=2, context=64, heads=2 * group, kv_heads=2, dim=dim, window=0, kv=policy.storage, new=40
        )  # fmt: skip
        for config in PREFILL.configs(policy, shape):
            [launch] = PREFILL.launches(policy, shape, config)
            constants = launch.variant.all_constants
            in_program = constants["G"]
            assert 1 <= in_program <= config["ROWS"]
            assert in_program * constants["PARTS"] == group
            assert launch.grid == (-(-40 // (config["ROWS"] // in_program)), 2 * constants["PARTS"], 2)
