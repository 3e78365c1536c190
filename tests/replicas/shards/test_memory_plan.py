"""Plans of a divided model before anything is loaded, beside what its processes then hold."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from awq_files import build_awq
from decoder_steps import exact_ops
from decoder_tensors import kept
from fp8_files import build_fp8
from gptq_files import build_gptq
from hollow_checkpoints import INT4, LLAMA_7B, write_hollow
from tiny_checkpoints import build_checkpoint

from motley import Engine
from motley.kernels.cpu.c_kernels.native_build import load_library
from motley.replicas.capacity import device_fit as whole_fit
from motley.replicas.capacity import kv_sizing
from motley.replicas.capacity.device_fit import FitWorkload, TargetDevice, find_table_devices, local_cpu
from motley.replicas.engine_config import EngineConfig
from motley.replicas.kv.memory_budget import HISTOGRAM_BYTES, cpu_kv_budget, kv_budget
from motley.replicas.loading.model_loader import load_model
from motley.replicas.model.checkpoint_inspection import Checkpoint, inspect_checkpoint
from motley.replicas.model.sharding.ranks import Ranks
from motley.replicas.model.sharding.split import shard_for_rank
from motley.replicas.model.sharding.stages import pipeline_stages
from motley.replicas.parallel.planning.device_report import device_report
from motley.replicas.parallel.planning.layer_assignment import choose_layers
from motley.replicas.parallel.planning.memory_plan import (
    ParallelLayout,
    ParallelMemoryPlan,
    PlannedProcess,
    _NullExchange,
    plan_parallel_memory,
)
from motley.replicas.types import BLOCK_TOKENS

SHAPE = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 4}
FORMATS: dict[str, Callable[[Path], Path]] = {
    "dense, tied": lambda folder: build_checkpoint(folder, "qwen2", tie_word_embeddings=True, **SHAPE),
    "dense": lambda folder: build_checkpoint(folder, "llama", attention_bias=True, mlp_bias=True, **SHAPE),
    "gptq": lambda folder: build_gptq(folder, "qwen2", group_size=64, **SHAPE),
    "gptq, desc_act": lambda folder: build_gptq(folder, desc_act=True, group_size=64, **SHAPE),
    "awq": lambda folder: build_awq(folder, **SHAPE)[0],
    "fp8": lambda folder: build_fp8(folder, scales="rows", **SHAPE)[0],
}
DIVISIONS = {
    "TP 2": ParallelLayout(2),
    "PP 1:3": ParallelLayout(1, 2, (1, 3)),
    "TP 2 x PP 1:3": ParallelLayout(2, 2, (1, 3)),
}
ASKED = FitWorkload(context=128, batch=2, swap_memory_bytes=0)
CLOSE = 0.05


def loaded(
    checkpoint: Checkpoint, division: ParallelLayout, dtype: torch.dtype
) -> dict[tuple[int, int], tuple[int, int]]:
    """Stage, rank -> bytes of weights, and of a block of KV, as the loader keeps them."""
    ranks = [
        shard_for_rank(checkpoint.config, checkpoint.format, rank, division.ranks) for rank in range(division.ranks)
    ]
    found = {}
    for stage in pipeline_stages(checkpoint.config.num_layers, division.layers or (checkpoint.config.num_layers,)):
        for rank in range(division.ranks):
            own = Ranks(ranks, rank, _NullExchange()) if division.ranks > 1 else None
            decoder = load_model(checkpoint.folder, exact_ops(dtype), ranks=own, stage=stage).decoder
            local = decoder.local
            kv = decoder.ops.allocate_kv(local.num_layers, 1, *local.kv_shape)
            found[stage.index, rank] = kept(decoder), sum(cache.nbytes for cache in kv)
    return found


def on(
    checkpoint: Checkpoint, place: TargetDevice, division: ParallelLayout, asked: FitWorkload = ASKED
) -> ParallelMemoryPlan:
    """Every stage on a device of that kind."""
    return plan_parallel_memory(checkpoint, [place] * division.stages, asked, division)


def told(divided: ParallelMemoryPlan) -> dict[tuple[int, int], tuple[int, int]]:
    return {
        (each.stage.index, rank): (each.parts.loaded, each.parts.kv_block)
        for each in divided.processes
        for rank in each.ranks
    }


@pytest.mark.parametrize("name", FORMATS)
def test_each_process_keeps_what_was_told(name: str, tmp_path: Path) -> None:
    checkpoint = inspect_checkpoint(FORMATS[name](tmp_path / "model"))
    for dtype, (what, division) in itertools.product((torch.float32, torch.bfloat16), DIVISIONS.items()):
        found = told(on(checkpoint, local_cpu(functools.partial(exact_ops, dtype)), division))
        expected = loaded(checkpoint, division, dtype)
        assert found.keys() == expected.keys()
        for process, (weights, kv_block) in expected.items():
            assert found[process][0] == pytest.approx(weights, rel=CLOSE), (dtype, what, process)
            assert found[process][1] == kv_block


def test_uneven_ranks_are_told_apart(tmp_path: Path) -> None:
    """Three KV heads on two ranks, an odd number of tokens."""
    options = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 192, "vocab_size": 259}
    checkpoint = inspect_checkpoint(build_checkpoint(tmp_path / "model", "llama", **options))
    found = told(on(checkpoint, local_cpu(exact_ops), ParallelLayout(2)))
    assert found[0, 1][1] == 2 * found[0, 0][1]
    expected = loaded(checkpoint, ParallelLayout(2), torch.float32)
    for process in expected:
        assert found[process][0] == pytest.approx(expected[process][0], rel=CLOSE)


def test_one_process_is_what_is_told_of_the_whole(tmp_path: Path) -> None:
    checkpoint = inspect_checkpoint(write_hollow(tmp_path, {**LLAMA_7B, "quantization_config": INT4}))
    for place in find_table_devices("7.5") + find_table_devices("8.0"):
        whole = whole_fit.fit_model(checkpoint, place, ASKED)
        one = on(checkpoint, place, ParallelLayout())
        [process] = one.processes
        assert whole.parts is not None
        assert process.parts == replace(whole.parts, host=0, buffers=0)
        assert (one.kv_tokens, one.context, one.batch, one.fits) == (
            whole.kv_tokens, whole.context, whole.batch, whole.fits,
        )  # fmt: skip


def test_what_one_card_is_too_small_for_fits_four(tmp_path: Path) -> None:
    """A dense 7B on T4s of 16 GB: by ranks, by stages, and by both; each card has about a quarter."""
    checkpoint = inspect_checkpoint(write_hollow(tmp_path, LLAMA_7B))
    [t4] = find_table_devices("Tesla T4")
    asked = replace(ASKED, context=4096)
    alone = on(checkpoint, t4, ParallelLayout(), asked)
    assert not alone.fits
    for division in (ParallelLayout(4), ParallelLayout(1, 4), ParallelLayout(2, 2)):
        four = on(checkpoint, t4, division, asked)
        assert four.fits
        assert sum(four.layers) == 32
        sizes = [each.parts.loaded for each in four.processes for _ in each.ranks]
        assert len(sizes) == 4
        assert sum(sizes) == pytest.approx(alone.processes[0].parts.loaded, rel=0.01)
        assert max(sizes) < 0.29 * sum(sizes)
    p4 = on(checkpoint, find_table_devices("Tesla P4")[0], ParallelLayout(2), asked)
    assert (p4.fits, p4.kv_tokens) == (False, 0)
    assert p4.missing > 0


def test_unequal_cards_have_layers_by_what_they_are(tmp_path: Path) -> None:
    """A T4 and an A100: the larger takes most, in whichever order, and each holds what it would by itself."""
    checkpoint = inspect_checkpoint(write_hollow(tmp_path, LLAMA_7B))
    [t4], [a100] = find_table_devices("Tesla T4"), find_table_devices("NVIDIA A100-SXM4-40GB")
    asked = replace(ASKED, context=4096)
    found, turned = (
        plan_parallel_memory(checkpoint, places, asked, ParallelLayout(1, 2)) for places in ([t4, a100], [a100, t4])
    )
    for each, small in ((found, 0), (turned, 1)):
        assert each.fits
        assert 1 <= each.layers[small] <= 6 < 26 <= each.layers[1 - small]
        assert [process.place for process in each.processes] == list(each.places)
    same = on(checkpoint, a100, ParallelLayout(1, 2, found.layers), asked)
    assert found.processes[1].parts == same.processes[1].parts
    twice = plan_parallel_memory(checkpoint, [t4, a100], asked, ParallelLayout(2, 2))
    assert (twice.layers, [each.ranks for each in twice.processes]) == (found.layers, [(0,), (1,), (0,), (1,)])


def test_a_card_that_holds_weights_in_fp32_has_fewer_layers(tmp_path: Path) -> None:
    """A P40 reads a little faster than a T4, and of a dense model twice as much; of int4 as much."""
    dense, int4 = (
        inspect_checkpoint(write_hollow(tmp_path / name, {**LLAMA_7B, **quantized}))
        for name, quantized in (("dense", {}), ("int4", {"quantization_config": INT4}))
    )
    [p40], [t4] = find_table_devices("Tesla P40"), find_table_devices("Tesla T4")
    by_model = [plan_parallel_memory(each, [p40, t4], ASKED, ParallelLayout(1, 2)) for each in (dense, int4)]
    assert all(each.fits for each in by_model)
    assert by_model[0].layers[0] < 16 <= by_model[1].layers[0]
    heads = [process.parts.loaded / process.place.device.bandwidth for process in by_model[0].processes]  # type: ignore[union-attr]
    assert heads[0] == pytest.approx(heads[1], rel=0.15), "both take as long"


def test_logits_and_histories_are_where_they_are_made(tmp_path: Path) -> None:
    """The last stage makes logits, the first process chooses of them, and others have neither."""
    checkpoint = inspect_checkpoint(write_hollow(tmp_path, LLAMA_7B))
    found = on(checkpoint, find_table_devices("Tesla T4")[0], ParallelLayout(2, 3, (10, 11, 11)))
    by_process = {(each.stage.index, rank): each.parts for each in found.processes for rank in each.ranks}
    step = {where: parts.activations - parts.kv_block for where, parts in by_process.items()}  # padding has a block
    logits = (512 + 2 * 64) * 4 * 32_000
    for stage, rank in ((0, 1), (1, 0), (1, 1)):
        assert step[stage, rank] < logits
    for stage, rank in ((0, 0), (2, 0), (2, 1)):
        assert step[stage, rank] > logits
    assert step[0, 0] - step[2, 0] == (2 * 64 + 1) * 32_000 * 2 + 64 * HISTOGRAM_BYTES


def test_room_of_a_cpu_is_shared_by_its_processes(tmp_path: Path) -> None:
    """It has as many blocks as without stages or ranks, but for what they hold twice."""
    checkpoint = inspect_checkpoint(build_checkpoint(tmp_path / "model", **SHAPE))
    place = replace(local_cpu(exact_ops), total=2**28, free=2**28)
    whole, *others = (on(checkpoint, place, each) for each in (ParallelLayout(), *DIVISIONS.values()))
    for each in others:
        assert each.kv_tokens == pytest.approx(whole.kv_tokens, rel=0.01)


@pytest.mark.parametrize("scarce", ["card", "host"])
def test_room_beside_a_card_is_the_least_of_both(scarce: str, tmp_path: Path) -> None:
    """A card has the layers of its stage of each block, and a CPU those of all of its own."""
    checkpoint = inspect_checkpoint(build_checkpoint(tmp_path / "model", **SHAPE))
    division = ParallelLayout(1, 3, (2, 1, 1))
    [card] = find_table_devices("Tesla T4")
    host = local_cpu(exact_ops)
    host = replace(host, total=2**24, free=2**24) if scarce == "host" else replace(host, free=2**50)
    found = plan_parallel_memory(checkpoint, [card, host, host], ASKED, division)
    assert found.mixed
    first, *others = [each.parts for each in found.processes]
    if scarce == "host":
        room = cpu_kv_budget(host.free - sum(each.loaded for each in others)).nbytes
        blocks = room // sum(each.kv_block for each in others)
    else:
        blocks = kv_budget(card.free - first.loaded, card.total, first).nbytes // first.kv_block
    assert found.kv_tokens == blocks * BLOCK_TOKENS
    assert blocks > 0


@pytest.mark.skipif(load_library()[0] is None, reason="no C compiler")
def test_room_is_what_an_engine_of_such_processes_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which looks at what is free when its weights are there already."""
    folder, free = build_checkpoint(tmp_path / "model", "llama", **SHAPE), 2**23
    monkeypatch.setattr(kv_sizing, "free_memory", lambda: free)
    settings: dict[str, Any] = {"tensor_parallel": 2, "pipeline_parallel": 2, "pipeline_layers": (1, 3)}
    with Engine(folder, dtype="float32", **settings) as engine:
        blocks = engine._built.profile.kv_blocks_total
    place = local_cpu(exact_ops)
    weights = sum(len(each.ranks) * each.parts.loaded for each in _processes(folder, place))
    found = on(inspect_checkpoint(folder), replace(place, free=free + weights), DIVISIONS["TP 2 x PP 1:3"])
    assert found.kv_tokens == blocks * BLOCK_TOKENS


def _processes(folder: Path, place: TargetDevice) -> Sequence[PlannedProcess]:
    return on(inspect_checkpoint(folder), place, DIVISIONS["TP 2 x PP 1:3"]).processes


def test_layers_of_a_cpu_are_those_that_the_engine_chooses(tmp_path: Path) -> None:
    """A head of many tokens is as much as several layers."""
    folder = build_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=6, vocab_size=3000)
    checkpoint = inspect_checkpoint(folder)
    found = on(checkpoint, local_cpu(exact_ops), ParallelLayout(1, 2))
    assert found.layers == (5, 1)
    accounts = [device_report(checkpoint, local_cpu(exact_ops))] * 2
    assert (found.layers, found.why) == choose_layers(
        checkpoint.config, EngineConfig(pipeline_parallel=2), lambda: accounts
    )


@pytest.mark.parametrize(
    ("division", "said"),
    [
        (ParallelLayout(3), "3 ranks cannot share 2 KV heads and 4 heads"),
        (ParallelLayout(1, 2, (1, 1)), "add up to the 4 layers of the model"),
        (ParallelLayout(1, 5), "5 stages are more than the 4 layers"),
    ],
)
def test_what_cannot_be_divided_so_is_refused(division: ParallelLayout, said: str, tmp_path: Path) -> None:
    checkpoint = inspect_checkpoint(build_checkpoint(tmp_path / "model", "llama", **SHAPE))
    found = on(checkpoint, local_cpu(exact_ops), division)
    assert said in found.refused
    assert (found.fits, found.kv_tokens, list(found.processes)) == (False, 0, [])


def test_too_many_stages_are_refused_before_any_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`motley fit --device "Tesla T4" --pipeline-parallel 1024` gave no answer within a minute."""
    checkpoint = inspect_checkpoint(build_checkpoint(tmp_path / "model", "llama", **SHAPE))
    for name in ("device_report", "best_layers"):
        monkeypatch.setattr(
            f"motley.replicas.parallel.planning.memory_plan.{name}", lambda *_, **__: pytest.fail("seen")
        )
    [place, *_] = find_table_devices("Tesla T4")
    assert "1024 stages are more than the 4 layers" in on(checkpoint, place, ParallelLayout(1, 1024)).refused
