"""Weights as a GPU's kernels hold them, from start to start: nothing is repacked, and the bits are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from decoder_steps import Session
from fp8_files import build_fp8
from gptq_files import build_gptq
from late_device import LateDevice
from tiny_checkpoints import build_checkpoint

from motley.kernels.device.device_context import interpreter_context
from motley.kernels.gpu.gpu_ops import GpuOps
from motley.replicas.checkpoint.cache import weights_cache
from motley.replicas.checkpoint.cache.weights_cache import WeightsCache
from motley.replicas.loading.model_loader import load_model
from motley.replicas.model.decoder import Decoder

# The least that int4 tiles hold.
SHAPE = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
INT4 = (8, 0)

BUILDS: dict[str, tuple[tuple[int, int], Callable[[Path], Path]]] = {
    "int4 in an order of its own": (INT4, lambda folder: build_gptq(folder, "qwen2", desc_act=True, **SHAPE)),
    "int8 in rows": ((8, 0), lambda folder: build_gptq(folder, "llama", bits=8, group_size=-1, **SHAPE)),
    "int8 in panels": ((6, 1), lambda folder: build_gptq(folder, "llama", bits=8, **SHAPE)),
    "int8 written out": ((6, 0), lambda folder: build_gptq(folder, "llama", bits=8, **SHAPE)),
    "fp8": ((8, 9), lambda folder: build_fp8(folder, "qwen2", **SHAPE)[0]),
    "tied": ((8, 0), lambda folder: build_checkpoint(folder, "qwen2", tie_word_embeddings=True, **SHAPE)),
    "tied, computed in fp32": (
        (6, 1), lambda folder: build_checkpoint(folder, "qwen2", tie_word_embeddings=True, **SHAPE),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _times_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of these tests were written this very moment."""
    monkeypatch.setattr(weights_cache, "RACY_S", 0.0)


@pytest.fixture
def cache(tmp_path: Path) -> WeightsCache:
    (tmp_path / "cache").mkdir(mode=0o700)
    return WeightsCache(tmp_path / "cache", min_bytes=0)


def start(folder: Path, cache: WeightsCache, capability: tuple[int, int], *, apart: bool = True) -> Decoder:
    copier = LateDevice() if apart else None
    decoder = load_model(folder, GpuOps(interpreter_context(capability)), cache=cache, copier=copier).decoder
    cache.wait()
    return decoder


def raw(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).view(torch.uint8)


def parts_of(decoder: Decoder) -> list[tuple[str, dict[str, int], dict[str, torch.Tensor]]]:
    linears = [part for layer in decoder.layers for joined in layer.linears for part in joined.parts]
    packed = [decoder.ops.packed(linear) for linear in (*linears, decoder.head)]
    plain = {"embedding": decoder.embedding, "norm": decoder.norm, "first": decoder.layers[0].input_norm}
    return [(each.kernel, dict(each.sizes), dict(each.tensors)) for each in packed] + [("", {}, plain)]


@pytest.mark.parametrize("kind", BUILDS)
def test_the_second_start_repacks_nothing_and_has_the_same(
    kind: str, tmp_path: Path, cache: WeightsCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    capability, build = BUILDS[kind]
    folder = build(tmp_path / "model")
    first = start(folder, cache, capability)

    def again(*_: object) -> None:
        raise AssertionError("a weight is repacked")

    if not kind.startswith("tied"):  # else the head is made of the embedding, which it is
        monkeypatch.setattr(GpuOps, "linear", again)
    for apart in (True, False):
        second = start(folder, cache, capability, apart=apart)
        for (kernel, sizes, mine), (other, others, theirs) in zip(parts_of(first), parts_of(second), strict=True):
            assert (kernel, sizes, mine.keys()) == (other, others, theirs.keys())
            assert all(torch.equal(*map(raw, (mine[name], theirs[name]))) for name in mine)
            assert all(mine[name].dtype == theirs[name].dtype for name in mine)
        assert first.nbytes == second.nbytes
        assert first.ops.choices == second.ops.choices
    assert len(list((cache.folder / "weights").iterdir())) == 1


def test_the_kernels_compute_the_same_of_it_and_another_capability_has_an_entry_of_its_own(
    tmp_path: Path, cache: WeightsCache
) -> None:
    folder = build_gptq(tmp_path, "qwen2", desc_act=True, **SHAPE)
    first, second = (start(folder, cache, INT4) for _ in range(2))
    logits = [Session(decoder, 32).feed([3, 141, 59, 26, 5]) for decoder in (first, second)]
    assert torch.equal(*logits)
    start(folder, cache, (8, 6))  # which has the same units
    assert len(list((cache.folder / "weights").iterdir())) == 2


def test_a_damaged_entry_is_made_anew(tmp_path: Path, cache: WeightsCache) -> None:
    folder = build_gptq(tmp_path, "qwen2", **SHAPE)
    first = start(folder, cache, INT4)
    [entry] = (cache.folder / "weights").iterdir()
    data = bytearray(entry.read_bytes())
    data[-100] ^= 1
    entry.write_bytes(data)
    second = start(folder, cache, INT4)
    for (_, _, mine), (_, _, theirs) in zip(parts_of(first), parts_of(second), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_one_process_of_a_host_has_a_copy_to_keep(cache: WeightsCache) -> None:
    """Copies of another device's memory would each process have one, and there may be many."""
    other = WeightsCache(cache.folder)
    assert cache.claim("a kind")
    assert not other.claim("a kind")
    assert other.claim("another")
    cache.give_up()
    assert other.claim("a kind")
