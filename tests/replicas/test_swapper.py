"""KV that is copied to the host and back, on a device that does everything as late as it may, or copies early."""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import drive
from late_device import LateDevice, LateOps
from tiny_checkpoints import build_checkpoint

from motley.kernels.device.device_context import interpreter_context
from motley.kernels.gpu.gpu_ops import GpuOps
from motley.replicas.demo import demo_path
from motley.replicas.engine.engine import EngineCore
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.engine.kv_reuse.swap_planner import SwapPlanner, SwapRates
from motley.replicas.engine.model_limits import ModelLimits
from motley.replicas.engine.scheduler import Scheduler
from motley.replicas.engine.startup.swap_setup import build_swapper
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import InvalidRequest
from motley.replicas.execution import swapper as module
from motley.replicas.execution.copier import CpuCopier
from motley.replicas.execution.runner import ModelRunner, Runner
from motley.replicas.execution.step_plan import StepPlan
from motley.replicas.execution.swapper import Swapper
from motley.replicas.gpu.gpu_runner import GpuRunner
from motley.replicas.kv.blocks import BlockPool, blocks_for
from motley.replicas.kv.memory_budget import SWAP_BYTES, swap_budget
from motley.replicas.loading.model_loader import LoadedModel, load_model
from motley.replicas.types import Request, SamplingParams

LONGEST, RUNNING = 512, 6
ALWAYS = SwapRates(1e-9, 1e-9, 1.0)
KINDS = ["cpu", "late", "early", "eager", "eager early"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(build_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2), LateOps())


def make(loaded: LoadedModel, kind: str, *, blocks: int, kept: int, reuse: bool = True) -> EngineCore:
    ops, config = LateOps(), loaded.config
    kv = ops.allocate_kv(config.num_layers, blocks + 1, *config.kv_shape)
    parts = [part for cache in kv for part in ops.kv_parts(cache)]
    runner: Runner
    if kind == "cpu":
        runner = ModelRunner(loaded.decoder, kv, ops.device, Swapper(parts, CpuCopier(), kept))
    else:
        device = LateDevice(early="early" in kind)
        runner = GpuRunner(
            loaded.decoder, kv, ops, device, max_running=RUNNING, max_model_len=LONGEST,
            longest_blocks=blocks_for(LONGEST), padding_block=blocks, vocab_size=config.vocab_size,
            graphs="eager" not in kind,
            swapper=Swapper(parts, device, kept),
        )  # fmt: skip
    pool, swap = BlockPool(blocks, reuse_prefixes=reuse), SwapPlanner(kept, ALWAYS)
    scheduler = Scheduler(pool, max_batch_tokens=64, max_running=RUNNING, swap=swap)
    return EngineCore(runner, scheduler, ModelLimits(config.vocab_size, min(LONGEST, blocks * 16), (9,)), None)


def request(prompt: list[int], **params: Any) -> Request:
    params = {"temperature": 0.0, "max_tokens": 40, "seed": 5, "ignore_eos": True} | params
    return Request("r", tuple(prompt), SamplingParams(**params))


SEEDED: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "top_p": 0.9}
CROWD = [
    request([1, 2, 3] * 10),
    request(list(range(40)), **SEEDED),
    request([7] * 60, temperature=0.8),
    request(list(range(60, 77)), frequency_penalty=1.0, temperature=0.7),
    request(list(range(70, 110)), temperature=2.5, ignore_eos=False, max_tokens=60),  # ends while a step is on its way
    request([5] * 33, logprobs=2),
    request(list(range(20, 68)), prompt_logprobs=1, max_tokens=30),
]


def run(core: EngineCore, requests: list[Request], **options: Any) -> list[list[int]]:
    messages = drive(core, requests, **options)
    return [[token for one in each for delta in one.deltas for token in delta.token_ids] for each in messages]


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> dict[str, list[list[int]]]:
    """Where tokens are sampled, device and host differ in the last digits: each with its own."""
    cores = {kind: make(loaded, kind, blocks=64, kept=0) for kind in ("cpu", "late", "eager")}
    return {kind: run(core, CROWD) for kind, core in cores.items()}


@pytest.mark.slow("Seven requests are swapped out and in, in two sizes of memory")
@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("staged", [1, 8])
@pytest.mark.parametrize("reuse", [True, False])
def test_nobody_can_tell(
    loaded: LoadedModel, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: str, staged: int, reuse: bool
) -> None:
    """Greedy and seeded, as graphs and as they come, whichever way copies race with steps."""
    monkeypatch.setattr(module, "STAGING_BLOCKS", staged)
    expected = alone["eager" if "eager" in kind else "cpu" if kind == "cpu" else "late"]
    for blocks, kept in ((8, 40), (11, 5)):
        core = make(loaded, kind, blocks=blocks, kept=kept, reuse=reuse)
        assert run(core, CROWD) == expected
        load = core.load()
        assert load.preemptions_swapped > load.preemptions_recomputed or kept == 5
        assert load.preemptions_recomputed > 0 or kept == 40


@pytest.mark.parametrize("kind", ["late", "early"])
def test_whoever_goes_leaves_no_copy_behind_in_blocks_of_others(loaded: LoadedModel, alone: Any, kind: str) -> None:
    """The request is cancelled as soon as its KV is on its way back: its blocks are others' before the copy is made."""
    core = make(loaded, kind, blocks=8, kept=40, reuse=False)
    gone: set[int] = set()

    def cancel() -> None:
        for sequence, _, _ in list(core.scheduler.swap._coming):
            gone.add(core._job_of[sequence.id].key)
        for key in gone:
            core.cancel(key)

    found = run(core, CROWD, each=cancel)
    assert 0 < len(gone) < len(CROWD)
    for key, (tokens, expected) in enumerate(zip(found, alone["late"], strict=True)):
        assert tokens == expected[: len(tokens)]
        assert key in gone or tokens == expected


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_all_of_a_block_comes_back_and_nothing_else_changes(kv_dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes and scales of int8, in every layer."""
    monkeypatch.setattr(module, "SLAB_BYTES", 2**16)
    ops = GpuOps(interpreter_context((8, 0)), kv_dtype)
    kv = ops.allocate_kv(3, 20, 2, 64)
    for cache in kv:
        cache.view(torch.uint8).random_(256)
    before = [cache.clone() for cache in kv]
    device = LateDevice()
    swapper = Swapper([part for cache in kv for part in ops.kv_parts(cache)], device, 30)
    assert len(swapper._slabs) > 1
    assert swapper.block_bytes * 20 == sum(cache.nbytes for cache in kv)
    blocks, kept = (3, 19, 0, 7, 8, 9, 11, 12, 13, 14), (29, 0, 5, 17, 4, 3, 2, 1, 28, 27)
    swapper.swap(StepPlan((), swap_out=tuple(zip(blocks, kept, strict=True))))
    swapper._pending[-1][1].wait()
    for cache in kv:
        cache.zero_()
    swapper.swap(StepPlan((), swap_in=tuple(zip(blocks, kept, strict=True))))
    swapper._pending[-1][1].wait()
    parts = [part for cache in before for part in ops.kv_parts(cache)]
    assert len(parts) == 3 * (4 if kv_dtype else 2)
    for part, was in zip(swapper._parts, sorted(parts, key=lambda part: -part.itemsize), strict=True):
        expected = torch.zeros_like(was)
        expected[list(blocks)] = was[list(blocks)]
        assert torch.equal(part.view(torch.uint8), expected.view(len(part), -1).view(torch.uint8))


def test_a_copy_that_cannot_be_given_to_the_device_is_over_before_it_is_told() -> None:
    cache = torch.zeros(10, 4)
    device = LateDevice()
    swapper = Swapper([cache], device, 10)
    copy = device.copy

    def fails(work: Any, after: Any = None) -> Any:
        mark = copy(work, after)
        if isinstance(work, partial):  # it had begun
            raise RuntimeError("out of memory")
        return mark

    device.copy = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        swapper.swap(StepPlan((), swap_out=((1, 1),)))
    assert not swapper._pending
    assert not device._copies


def test_rates_are_measured_and_leave_kv_as_it_is(loaded: LoadedModel) -> None:
    for kind in ("cpu", "late"):
        runner: Any = make(loaded, kind, blocks=12, kept=5)._runner
        for cache in runner.kv:
            cache.random_()
        before = [cache.clone() for cache in runner.kv]
        out_s, in_s = runner.swapper.measure()
        assert out_s > 0
        assert in_s > 0
        assert all(torch.equal(cache, was) for cache, was in zip(runner.kv, before, strict=True))
        assert not runner.swapper._pending


@pytest.mark.slow("Two engines load the demo model and answer six prompts five times")
def test_an_engine_that_is_asked_to_swaps(tmp_path: Path) -> None:
    """Rates are measured at warm-up and told; before that everything is computed again."""
    settings: dict[str, Any] = {"numerics": "exact", "threads": 1, "max_model_len": 256}
    roomy = Engine(demo_path(), **settings)
    assert "computing again: a CPU's KV lies in the host's memory" in roomy.choices["preemption"]
    block = sum(cache.nbytes for cache in roomy._built.runner.kv) // roomy._built.profile.kv_blocks_total
    small = Engine(demo_path(), **settings, kv_memory_bytes=17 * block, swap_memory_bytes=40 * block)
    assert small.choices["preemption"].startswith("40 blocks on the host")
    prompts = [[key] * 60 for key in range(1, 7)]
    for params in (
        SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=4, max_tokens=50, ignore_eos=True),
    ):
        expected = [one.token_ids for one in roomy.generate(prompts, params)]
        assert [one.token_ids for one in small.generate(prompts, params)] == expected
    core = small._built.core
    assert (core.load().preemptions_swapped, core.load().preemptions_recomputed > 0) == (0, True)
    small._built.warm_up()
    assert "ms to compute: " in small.choices["preemption"] == small._built.profile.choices["preemption"]
    assert core.scheduler.swap.rates is not None
    core.scheduler.swap.rates = ALWAYS  # whichever is faster here
    assert [one.token_ids for one in small.generate(prompts, params)] == expected
    assert core.load().preemptions_swapped > 0
    core.scheduler.swap.pool.check_idle()


def test_how_much_of_the_host_is_taken() -> None:
    assert swap_budget(5, 100, on_gpu=False) == (5, "as configured")
    assert swap_budget(0, 100, on_gpu=True)[0] == 0
    assert swap_budget(None, 2**40, on_gpu=False)[0] == 0
    assert swap_budget(None, 2**40, on_gpu=True) == (SWAP_BYTES, "the default")
    assert swap_budget(None, 2**32, on_gpu=True)[0] == 2**30


@pytest.mark.parametrize("value", [-1, True, 1.5, "4GiB"])
def test_what_is_no_number_of_bytes_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="swap_memory_bytes"):
        EngineConfig(swap_memory_bytes=value)


def test_memory_that_cannot_be_had_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="swap_memory_bytes: there is no room for one KV block"):
        Engine(demo_path(), swap_memory_bytes=1)

    def fails(*_: Any) -> torch.Tensor:
        raise RuntimeError("the host pins no more")

    monkeypatch.setattr(CpuCopier, "staging", fails)
    with pytest.raises(InvalidRequest, match="swap_memory_bytes: the host pins no more"):
        Engine(demo_path(), swap_memory_bytes=2**22)


def test_what_was_pinned_in_vain_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then nobody has it any more, the error that told of it neither."""
    pinned: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    class Short(LateDevice):
        def staging(self, size: int) -> torch.Tensor:
            if len(pinned) == 3:
                raise RuntimeError("the host pins no more")
            slab = super().staging(size)
            pinned.append(weakref.ref(slab))
            return slab

        def trim(self) -> None:
            alive.append(sum(one() is not None for one in pinned))

    monkeypatch.setattr(module, "SLAB_BYTES", 2**12)
    ops, config, copier = LateOps(), EngineConfig(swap_memory_bytes=2**20), Short()
    parts = [part for cache in ops.allocate_kv(2, 8, 2, 16) for part in ops.kv_parts(cache)]
    block_bytes = sum(part[0].nbytes for part in parts)
    with pytest.raises(InvalidRequest, match="swap_memory_bytes: the host pins no more"):
        build_swapper(config, ops, block_bytes, partial(Swapper, parts, copier), copier, 60)
    assert (len(pinned), alive) == (3, [0])
