"""Weights in tiers: what the plan promises, the same tokens, layers one ahead, and a disk that fails."""

from __future__ import annotations

import itertools
import mmap
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from awq_files import build_awq
from decoder_steps import Session, exact_ops
from fp8_files import build_fp8
from gptq_files import build_gptq
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import FAMILIES, build_checkpoint

from motley.kernels.cpu.cpu_ops import CpuOps
from motley.replicas.capacity.device_fit import FitWorkload, build_meta_decoder, fit_model, local_cpu
from motley.replicas.checkpoint.cache import weights_cache
from motley.replicas.checkpoint.cache.startup_prefetch import likely_packed_file
from motley.replicas.checkpoint.cache.weights_cache import WeightsCache
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.engine.startup.engine_builder import build_engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import EngineFault, InvalidRequest
from motley.replicas.loading.model_loader import LoadedModel, load_model
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.offload.disk.direct_file import DirectFile, DiskTable
from motley.replicas.offload.disk.disk_tier import DiskLayer, DiskTier
from motley.replicas.offload.disk.layer_prefetch import LayerPrefetcher
from motley.replicas.offload.planning.disk_plan import (
    PAGE_BYTES,
    DiskPlan,
    WeightSizes,
    disk_step_s,
    plan_disk,
    round_to_pages,
)
from motley.replicas.offload.planning.weight_budget import check_budget, weight_sizes
from motley_bench.checkpoints.random_checkpoint import SHAPES, write_dense

PROMPT = list(range(3, 40))
LAYERS = 6

BUILDS: dict[str, Callable[[Path], Path]] = {
    **{
        family: lambda folder, name=family: build_checkpoint(folder, name, num_hidden_layers=LAYERS)
        for family in FAMILIES
    },
    "tied": lambda folder: build_checkpoint(folder, "qwen2", num_hidden_layers=LAYERS, tie_word_embeddings=True),
    "gptq": lambda folder: build_gptq(folder, num_hidden_layers=LAYERS),
    "gptq, 8 bits": lambda folder: build_gptq(folder, "qwen2", bits=8, num_hidden_layers=LAYERS),
    "desc_act": lambda folder: build_gptq(folder, desc_act=True, shared_order=False, num_hidden_layers=LAYERS),
    "awq": lambda folder: build_awq(folder, num_hidden_layers=LAYERS)[0],
    "fp8": lambda folder: build_fp8(folder, num_hidden_layers=LAYERS)[0],
}


@pytest.fixture(autouse=True)
def _times_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of these tests were written this very moment."""
    monkeypatch.setattr(weights_cache, "RACY_S", 0.0)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return BUILDS["qwen3"](tmp_path / "model")


def _cache(tmp_path: Path) -> WeightsCache:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    return WeightsCache(folder, min_bytes=0)


def _sizes(folder: Path) -> WeightSizes:
    checkpoint = inspect_checkpoint(folder)
    return weight_sizes(build_meta_decoder(checkpoint.config, checkpoint.format, checkpoint.tensors, exact_ops()))


def _least(sizes: WeightSizes) -> int:
    """The smallest budget."""
    return sizes.fixed + 2 * round_to_pages(max(sizes.layers))


def _tiered(folder: Path, tmp_path: Path, budget: int, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(folder, exact_ops(dtype), cache=_cache(tmp_path), weights_memory=budget)


def _tier(loaded: LoadedModel) -> DiskTier:
    assert isinstance(loaded.decoder.tier, DiskTier)
    return loaded.decoder.tier


SIZES = st.builds(
    WeightSizes,
    st.integers(1, 10**9),
    st.integers(1, 10**9),
    st.lists(st.integers(1, 10**8), min_size=1, max_size=80).map(tuple)
    | st.integers(1, 80).map(lambda n: (10**7,) * n),
)


@given(SIZES, st.integers(1, 2 * 10**9), st.integers(0, 10**9))
def test_the_budget_is_kept_and_more_of_it_leaves_no_more_on_disk(sizes: WeightSizes, budget: int, more: int) -> None:
    every = DiskPlan(sizes, (True,) * len(sizes.layers), embedding=True)
    try:
        found = plan_disk(sizes, budget)
    except InvalidRequest:
        found = None
    if found is None:
        assert every.memory_bytes > budget
        return
    assert found.memory_bytes <= budget
    assert bool(found.embedding or found.layers) == (sizes.nbytes > budget)
    larger = plan_disk(sizes, budget + more)
    assert len(larger.layers) <= len(found.layers)
    assert larger.embedding <= found.embedding


@given(st.integers(1, 80), st.data())
def test_layers_on_disk_are_spread_evenly(count: int, data: st.DataObject) -> None:
    sizes = WeightSizes(1, 1, (PAGE_BYTES,) * count)
    gone = data.draw(st.integers(0, count))
    budget = 1 + (count - gone) * PAGE_BYTES + 2 * round_to_pages(PAGE_BYTES)
    on_disk = plan_disk(sizes, budget).layers
    if not on_disk:
        return
    assert len(on_disk) <= gone
    around = [*on_disk, on_disk[0] + count]
    gaps = [after - before for before, after in itertools.pairwise(around)]
    assert max(gaps) - min(gaps) <= 1


def test_as_many_layers_stay_as_there_is_room_for() -> None:
    sizes = WeightSizes(500, 1000, (PAGE_BYTES,) * 10)
    least = 1000 + 4 * PAGE_BYTES  # two buffers of two pages each
    with pytest.raises(InvalidRequest, match=rf"expected at least {least} bytes"):
        plan_disk(sizes, least - 1)
    assert len(plan_disk(sizes, least).layers) == 10
    assert len(plan_disk(sizes, least + 3 * PAGE_BYTES - 1).layers) == 8
    assert len(plan_disk(sizes, least + 3 * PAGE_BYTES).layers) == 7
    assert plan_disk(sizes, sizes.nbytes - 1).on_disk == (False,) * 10  # the embedding alone goes
    assert not plan_disk(sizes, sizes.nbytes).embedding


def _plan(on_disk: tuple[bool, ...]) -> DiskPlan:
    return DiskPlan(WeightSizes(0, 0, (100,) * len(on_disk)), on_disk, embedding=True)


def test_a_step_takes_as_long_as_the_slower_of_disk_and_computing() -> None:
    all_of_them = _plan((True,) * 4)
    assert disk_step_s(all_of_them, 100.0, [0.1] * 4, 0.0) == pytest.approx(4.0)  # 1 s to read each
    assert disk_step_s(all_of_them, 1000.0, [1.0] * 4, 0.5) == pytest.approx(4.5)
    assert disk_step_s(_plan((False,) * 4), 1.0, [1.0] * 4, 0.5) == pytest.approx(4.5)
    # Spread evenly each is read while two others compute; next to each other the second buffer helps once.
    assert disk_step_s(_plan((True, False, False) * 2), 100.0, [0.5] * 6, 0.0) == pytest.approx(3.0)


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.floats(1, 1e4), st.floats(0, 2), st.floats(0, 2))
def test_a_step_is_no_faster_than_its_parts_and_no_slower_than_one_after_the_other(
    on_disk: list[bool], rate: float, layer_s: float, rest_s: float
) -> None:
    plan = _plan(tuple(on_disk))
    reading, computing = plan.read_bytes / rate, len(on_disk) * layer_s + rest_s
    found = disk_step_s(plan, rate, [layer_s] * len(on_disk), rest_s)
    assert max(reading, computing) * (1 - 1e-9) <= found + 1e-9
    assert found <= (reading + computing) * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("kind", BUILDS)
def test_tokens_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    folder = BUILDS[kind](tmp_path / "model")
    whole = load_model(folder, exact_ops())
    expected = Session(whole.decoder).greedy(PROMPT, 12)
    sizes = _sizes(folder)
    for budget in (_least(sizes), _least(sizes) + 3 * max(sizes.layers)):
        found = _tiered(folder, tmp_path, budget)
        tier = _tier(found)
        assert tier.plan.layers
        assert sum(isinstance(layer, DiskLayer) for layer in found.decoder.layers) == len(tier.plan.layers)
        tokens, logits = Session(found.decoder).greedy(PROMPT, 12)
        assert tokens == expected[0]
        assert torch.equal(logits, expected[1])
        assert found.fingerprint == whole.fingerprint
        assert tier.plan.sizes == sizes  # what headers tell is what the file has
        tier.close()


def test_bf16_is_to_the_bit_the_same_too(checkpoint: Path, tmp_path: Path) -> None:
    expected = Session(load_model(checkpoint, exact_ops(torch.bfloat16)).decoder).feed(PROMPT)
    found = _tiered(checkpoint, tmp_path, 300_000, torch.bfloat16)
    assert _tier(found).plan.layers
    assert torch.equal(Session(found.decoder).feed(PROMPT), expected)


def test_an_entry_of_a_start_without_tiers_serves_and_so_does_one_of_a_start_with_them(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = _cache(tmp_path)
    plain = load_model(checkpoint, exact_ops(), cache=cache)
    cache.wait()
    [entry] = (cache.folder / "weights").iterdir()
    budget = _least(_sizes(checkpoint))

    def repacked(*_: object) -> None:
        raise AssertionError("a weight is repacked")

    monkeypatch.setattr(CpuOps, "linear", repacked)
    found = _tiered(checkpoint, tmp_path, budget)
    assert torch.equal(Session(found.decoder).feed(PROMPT), Session(plain.decoder).feed(PROMPT))
    entry.unlink()
    monkeypatch.undo()
    monkeypatch.setattr(weights_cache, "RACY_S", 0.0)
    _tiered(checkpoint, tmp_path, 10**9)
    monkeypatch.setattr(CpuOps, "linear", repacked)
    again = load_model(checkpoint, exact_ops(), cache=_cache(tmp_path))
    assert torch.equal(Session(again.decoder).feed(PROMPT), Session(plain.decoder).feed(PROMPT))


def test_fit_is_told_of_the_file_that_a_start_reads(checkpoint: Path, tmp_path: Path) -> None:
    cache = _cache(tmp_path)
    assert likely_packed_file(checkpoint, str(cache.folder)) is None
    found = _tiered(checkpoint, tmp_path, _least(_sizes(checkpoint)))
    kept = likely_packed_file(checkpoint, str(cache.folder))
    assert kept is not None
    assert kept.samefile(f"/proc/self/fd/{_tier(found).places[0].file.fileno()}")
    assert likely_packed_file(checkpoint, "off") is None


def test_what_is_held_is_what_stays_and_two_buffers(checkpoint: Path, tmp_path: Path) -> None:
    sizes = _sizes(checkpoint)
    budget = _least(sizes) + max(sizes.layers)
    found = _tiered(checkpoint, tmp_path, budget)
    rows = PAGE_BYTES * 2  # that a row of the embedding is read into
    assert found.weight_bytes <= budget + rows
    assert found.weight_bytes == pytest.approx(_tier(found).plan.memory_bytes, abs=rows + 64 * 40)
    assert found.weight_bytes < load_model(checkpoint, exact_ops()).weight_bytes
    assert not isinstance(found.decoder.embedding, torch.Tensor)
    everything = _tiered(checkpoint, tmp_path, sizes.nbytes)
    assert everything.weight_bytes == load_model(checkpoint, exact_ops()).weight_bytes


def test_one_layer_is_read_ahead_and_no_more() -> None:
    read: list[tuple[int, int]] = []
    ahead = LayerPrefetcher([1, 4, 7], lambda layer, buffer: read.append((layer, buffer)))
    assert ahead.take(1) == 0
    assert ahead.take(4) == 1  # it was on its way while 1 computed
    assert read == [(1, 0), (4, 1)]  # 7 has no buffer before 1 has computed
    ahead.give(0)
    assert ahead.take(7) == 0
    ahead.give(1)
    assert ahead.take(1) == 1  # of the next step
    assert read == [(1, 0), (4, 1), (7, 0), (1, 1)]
    ahead.close()


def test_reading_goes_on_while_a_layer_computes() -> None:
    began, may_end = threading.Event(), threading.Event()

    def read(layer: int, buffer: int) -> None:
        if layer == 2:
            began.set()
            assert may_end.wait(60)

    ahead = LayerPrefetcher([0, 2], read)
    buffer = ahead.take(0)
    assert began.wait(60)  # the next is being read, and the first may compute meanwhile
    may_end.set()
    ahead.give(buffer)
    assert ahead.take(2) == 1
    ahead.close()


def test_a_read_that_fails_is_told_of_its_own_layer_and_the_next_step_begins_anew() -> None:
    broken = {4}

    def read(layer: int, buffer: int) -> None:
        if layer in broken:
            raise EngineFault(f"layer {layer}")

    ahead = LayerPrefetcher([1, 4, 7], read)
    ahead.give(ahead.take(1))
    with pytest.raises(EngineFault, match="layer 4"):
        ahead.take(4)
    broken.clear()
    for layer in (1, 4, 7, 1, 7):  # the last out of turn
        ahead.give(ahead.take(layer))
    ahead.close()


@pytest.fixture
def tiered_config(tmp_path: Path, checkpoint: Path) -> dict[str, Any]:
    (tmp_path / "cache").mkdir(mode=0o700)
    return {
        "dtype": "float32", "threads": 1, "kv_memory_bytes": 2**20, "weights_cache": str(tmp_path / "cache"),
        "weights_memory_bytes": _least(_sizes(checkpoint)),
    }  # fmt: skip


def test_an_engine_serves_many_at_once_and_says_what_is_on_disk(
    checkpoint: Path, tiered_config: dict[str, Any]
) -> None:
    prompts = [list(range(first, first + 20)) for first in range(5)]
    sampling = {"temperature": 0.0, "max_tokens": 10, "seed": 0}
    whole = {**tiered_config, "weights_memory_bytes": None, "weights_cache": "off"}
    with Engine(checkpoint, **whole) as engine:
        expected = [each.token_ids for each in engine.generate(prompts, engine.sampling(**sampling))]
    with Engine(checkpoint, **tiered_config) as engine:
        found = [each.token_ids for each in engine.generate(prompts, engine.sampling(**sampling))]
        said = engine._built.profile.choices["weights"]
    assert found == expected
    assert re.match(r"6 of 6 layers and the embedding's rows on disk, .* tokens/s expected of one sequence: ", said)


def test_a_disk_that_fails_ends_the_requests_of_the_step_and_no_others(
    checkpoint: Path, tiered_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = {"temperature": 0.0, "max_tokens": 10, "seed": 0}
    with Engine(checkpoint, **tiered_config) as engine:
        [expected] = engine.generate([PROMPT], engine.sampling(**sampling))
        whole = DirectFile.read

        def failing(file: DirectFile, memory: memoryview, begin: int, end: int) -> int:
            if end - begin > PAGE_BYTES:
                raise EngineFault("weights on disk cannot be read: [Errno 5] Input/output error")
            return whole(file, memory, begin, end)

        monkeypatch.setattr(DirectFile, "read", failing)
        with pytest.raises(EngineFault, match="Input/output error"):
            engine.generate([[5, 6, 7]], engine.sampling(**sampling))
        monkeypatch.undo()
        [again] = engine.generate([PROMPT], engine.sampling(**sampling))
    assert again.token_ids == expected.token_ids


@pytest.mark.parametrize("direct", [True, False])
def test_reads_are_of_any_bytes_and_a_short_one_is_a_fault(direct: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = os.urandom(3 * PAGE_BYTES + 100)
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    file = DirectFile(descriptor, direct=direct)
    memory = mmap.mmap(-1, 8 * PAGE_BYTES)
    for begin, end in [
        (0, 10),
        (64, 2 * PAGE_BYTES),
        (PAGE_BYTES + 64, 3 * PAGE_BYTES + 100),
        (3 * PAGE_BYTES, 3 * PAGE_BYTES + 100),
    ]:
        offset = file.read(memoryview(memory), begin, end)
        assert memory[offset : offset + end - begin] == data[begin:end]
    for end in (3 * PAGE_BYTES + 101, 4 * PAGE_BYTES, 5 * PAGE_BYTES):
        with pytest.raises(EngineFault, match=f"{end} were expected"):
            file.read(memoryview(memory), PAGE_BYTES, end)
    file.close()
    os.close(descriptor)


def test_rows_are_those_of_the_table_repeated_or_not(tmp_path: Path) -> None:
    table = torch.randn(50, 700)
    path = tmp_path / "table"
    path.write_bytes(bytes(128) + table.numpy().tobytes())
    descriptor = os.open(path, os.O_RDONLY)
    rows = DiskTable(DirectFile(descriptor), 128, (50, 700), torch.float32)
    ids = torch.tensor([49, 0, 7, 49, 0, 3])
    assert torch.equal(rows[ids], table[ids])
    os.close(descriptor)


def test_too_little_memory_is_refused_before_anything_is_read(
    checkpoint: Path, tiered_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.replicas.loading.model_loader.digest_pieces", None)
    less = tiered_config["weights_memory_bytes"] - 1
    with pytest.raises(InvalidRequest, match=r"weights_memory_bytes: .* is too little: head and norms take"):
        build_engine(checkpoint, EngineConfig(**{**tiered_config, "weights_memory_bytes": less}))


def test_what_cannot_be_in_tiers_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong, param in (
        ({"tensor_parallel": 2}, "tensor_parallel"), ({"pipeline_parallel": 2}, "pipeline_parallel"),
        ({"weights_cache": "off"}, "weights_cache"),
        ({"weights_memory_bytes": 0}, "weights_memory_bytes"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as refused:
            EngineConfig(**{"weights_memory_bytes": 2**30, **wrong})
        assert refused.value.param == param
    with pytest.raises(InvalidRequest, match="there is none"):
        load_model(checkpoint, exact_ops(), weights_memory=10**6)
    monkeypatch.setattr(weights_cache, "FREE_SHARE", 1.0)
    with pytest.raises(InvalidRequest, match="no room"):
        _tiered(checkpoint, tmp_path, 10**6)


def test_without_c_kernels_it_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    ops = CpuOps(torch.float32, "exact", None, None, "no compiler")
    with pytest.raises(InvalidRequest, match="C kernels: no compiler"):
        load_model(checkpoint, ops, cache=_cache(tmp_path), weights_memory=10**6)
    found = inspect_checkpoint(checkpoint)
    with pytest.raises(InvalidRequest, match="cannot be kept on disk"):
        check_budget(build_meta_decoder(found.config, found.format, found.tensors, ops), 10**6)


def test_fit_tells_what_stays(checkpoint: Path) -> None:
    found = inspect_checkpoint(checkpoint)
    budget = _least(_sizes(checkpoint)) + max(_sizes(checkpoint).layers)
    place = local_cpu(exact_ops)
    all_of_it = fit_model(found, place, FitWorkload(64, 1))
    some = fit_model(found, place, FitWorkload(64, 1, weights_memory_bytes=budget))
    assert all_of_it.parts is not None
    assert some.parts is not None
    assert some.tiers == plan_disk(_sizes(checkpoint), budget)
    assert some.parts.loaded <= budget < all_of_it.parts.loaded
    assert some.kv_tokens >= all_of_it.kv_tokens
    assert "is too little" in fit_model(found, place, FitWorkload(64, 1, weights_memory_bytes=1)).refused


_START = """
import ctypes, gc, re, sys
from pathlib import Path
import torch
from motley.replicas.loading.operator_choice import choose_operators
from motley.replicas.engine_config import EngineConfig
from motley.replicas.loading.model_loader import load_model
from motley.replicas.checkpoint.cache.weights_cache import WeightsCache

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

small, large, folder, budget = sys.argv[1:]
torch.set_num_threads(1)
ops = lambda: choose_operators(EngineConfig(dtype="bfloat16"), torch.bfloat16)[0]
load_model(small, ops())
before = status("VmRSS")
model = load_model(large, ops(), cache=WeightsCache(Path(folder), min_bytes=0), weights_memory=int(budget))
model.decoder.tier.ahead.take(model.decoder.tier.plan.layers[0])
model.decoder.tier.ahead.take(model.decoder.tier.plan.layers[1])
print(status("VmHWM") - before, model.weight_bytes, model.decoder.tier.plan.sizes.nbytes)
"""


@pytest.mark.thorough
def test_neither_start_has_more_in_memory_than_the_budget(tmp_path: Path) -> None:
    shape = replace(SHAPES["tiny"], hidden_size=1024, intermediate_size=4096, num_hidden_layers=12)
    write_dense(SHAPES["tiny"], tmp_path / "small")
    write_dense(shape, tmp_path / "large")
    budget = 160 << 20
    folder = _cache(tmp_path).folder
    command = [sys.executable, "-c", _START, str(tmp_path / "small"), str(tmp_path / "large"), str(folder), str(budget)]
    for _ in range(2):
        peak, held, whole = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
        assert whole > 340 << 20
        assert held <= budget
        assert peak < budget + (16 << 20)  # what is mapped of files, and Python's own
