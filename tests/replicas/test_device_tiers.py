"""Weights in tiers of a device with memory of its own: the same tokens, copies in the right order, and what is refused.

On a device that does all as late as it may, or copies as early: of neither a layer may be overwritten before it has
computed, nor computed before it is there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_tiers import AMPLE, LAYERS, budgets, engine, said, sizes_in, tier_of
from gptq_files import build_gptq
from hypothesis import given
from hypothesis import strategies as st
from late_device import LateDevice
from tiny_checkpoints import build_checkpoint

from motley.kernels.device.device_context import interpreter_context
from motley.kernels.gpu.gpu_ops import GpuOps
from motley.replicas.capacity.device_fit import FitWorkload, find_table_devices, fit_model
from motley.replicas.checkpoint.cache import weights_cache
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import EngineFault, InvalidRequest
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.offload.device import device_speed
from motley.replicas.offload.device.device_tier import OffloadedLayer
from motley.replicas.offload.disk.direct_file import DirectFile
from motley.replicas.offload.planning.device_plan import DevicePlan, offloaded_step_s, plan_device
from motley.replicas.offload.planning.disk_plan import WeightSizes


@pytest.fixture(autouse=True)
def _times_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of these tests were written this very moment."""
    monkeypatch.setattr(weights_cache, "RACY_S", 0.0)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=LAYERS)


SIZES = st.builds(
    WeightSizes,
    st.integers(1, 10**9),
    st.integers(1, 10**9),
    st.lists(st.integers(1, 10**8), min_size=1, max_size=60).map(tuple)
    | st.integers(1, 60).map(lambda n: (10**7,) * n),
)


@given(SIZES, st.integers(1, 2 * 10**9), st.integers(1, 2 * 10**9))
def test_both_budgets_are_kept_and_a_refusal_says_what_would_do(sizes: WeightSizes, budget: int, host: int) -> None:
    try:
        found = plan_device(sizes, budget, host)
    except InvalidRequest as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        least = int(str(refused).split("expected at least ")[1].split()[0])
        of_device = refused.param == "weights_memory_bytes"
        assert least > (budget if of_device else host)
        plan_device(sizes, *((least, AMPLE) if of_device else (budget, least)))
        return
    assert found.device_bytes <= budget
    assert found.host_bytes <= host or not found.layers
    assert bool(found.layers) == (sizes.nbytes > budget)
    assert len(plan_device(sizes, budget + 10**8, host + 2**28).layers) <= len(found.layers)
    if found.on("disk"):
        assert plan_device(sizes, budget, AMPLE).host_bytes > host, "what could be pinned is"


def test_a_step_takes_as_long_as_the_slowest_of_disk_link_and_computing() -> None:
    sizes = WeightSizes(0, 0, (100,) * 4)
    far, disk = (DevicePlan(sizes, (where,) * 4) for where in ("host", "disk"))
    assert offloaded_step_s(far, 100.0, 1.0, [0.1] * 4, 0.0) == pytest.approx(4.0)  # a second for each copy
    assert offloaded_step_s(far, 1000.0, 1.0, [1.0] * 4, 0.5) == pytest.approx(4.5)
    assert offloaded_step_s(disk, 1000.0, 50.0, [0.1] * 4, 0.0) == pytest.approx(8.0)
    mixed = DevicePlan(sizes, ("host", "device", "disk", "device"))
    assert offloaded_step_s(mixed, 100.0, 1000.0, [0.5] * 4, 0.0) == pytest.approx(2.0)
    assert offloaded_step_s(DevicePlan(sizes, ("device",) * 4), 1.0, 1.0, [1.0] * 4, 0.5) == pytest.approx(4.5)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("kind", ["host", "disk", "both"])
def test_tokens_are_those_of_the_whole_model(checkpoint: Path, kind: str, early: bool) -> None:
    with engine(checkpoint, LateDevice(), weights_cache="off") as whole:
        expected = said(whole)
    with engine(checkpoint, LateDevice(early=early), **budgets(checkpoint, kind)) as tiered:
        plan = tier_of(tiered).plan
        assert [bool(plan.on(place)) for place in ("host", "disk")] == [kind != "disk", kind != "host"]
        assert len(plan.layers) == LAYERS - (kind == "both")
        for _ in range(2):
            found = said(tiered)
            assert found[0] == expected[0]
            assert torch.equal(found[1], expected[1])
        choices = tiered._built.profile.choices
        assert choices["weights"].startswith(f"of {LAYERS} layers {len(plan.on('host')) or len(plan.layers)} ")
        assert tiered._built.runner.graphs is None


class _Hasty(LateDevice):
    """Copies nothing after what it should come after."""

    def copy(self, work: Callable[[], None], after: Any = None) -> Any:
        return super().copy(work)


class _Heedless(LateDevice):
    """Computes before what it should follow."""

    def follow(self, mark: Any) -> None:
        return None


@pytest.mark.parametrize("device", [_Hasty(early=True), _Heedless()])
def test_a_device_that_heeds_no_order_says_something_else(checkpoint: Path, device: LateDevice) -> None:
    """Shows that the test before this one can fail."""
    with engine(checkpoint, LateDevice(), weights_cache="off") as whole:
        expected = said(whole)[1]
    with engine(checkpoint, device, **budgets(checkpoint, "host")) as tiered:
        assert not torch.equal(said(tiered)[1], expected)


def test_what_is_held_is_what_the_plan_says(checkpoint: Path) -> None:
    with engine(checkpoint, LateDevice(), **budgets(checkpoint, "both")) as tiered:
        loaded, plan = tiered._built.weights.loaded, tier_of(tiered).plan
        assert sum(isinstance(layer, OffloadedLayer) for layer in loaded.decoder.layers) == LAYERS - 1
        assert loaded.weight_bytes == pytest.approx(plan.device_bytes, abs=64 * 60)
        assert plan.sizes == sizes_in(checkpoint), "what headers tell is what the file has"
    with engine(checkpoint, LateDevice(), weights_memory_bytes=AMPLE) as ample:
        assert ample._built.weights.loaded.decoder.tier is None, "all of it has room, and it runs as ever"


def test_a_disk_that_fails_ends_the_requests_of_the_step_and_no_others(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(checkpoint, LateDevice(), **budgets(checkpoint, "both")) as tiered:
        expected = said(tiered)

        def failing(*_: object) -> int:
            raise EngineFault("weights on disk cannot be read: [Errno 5] Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(DirectFile, "read", failing)
            with pytest.raises(EngineFault, match="Input/output error"):
                said(tiered)
        found = said(tiered)
        assert found[0] == expected[0]
        assert torch.equal(found[1], expected[1])


class _Full(LateDevice):
    """Has no memory for a piece of work, as a GPU says when it is submitted."""

    until: int | None = None  # so many more are taken

    def submit(self, work: Callable[[], None]) -> None:
        if self.until is not None:
            self.until -= 1
            if self.until < 0:
                raise RuntimeError("CUDA out of memory")
        super().submit(work)


@pytest.mark.parametrize("kind", ["host", "both"])
def test_a_step_that_fails_midway_leaves_no_layer_where_another_is_wanted(checkpoint: Path, kind: str) -> None:
    device = _Full(early=True)
    with engine(checkpoint, device, **budgets(checkpoint, kind)) as tiered:
        expected = said(tiered)
        for until in range(2, 14, 3):
            device.until = until
            with pytest.raises(EngineFault, match="out of memory"):
                said(tiered)
            device.until = None
            found = said(tiered)
            assert found[0] == expected[0]
            assert torch.equal(found[1], expected[1])


def test_too_little_of_either_memory_is_refused(checkpoint: Path) -> None:
    """And what the host does not pin: what weights are copied through, or where they shall stay."""

    class Short(LateDevice):
        left = 0

        def staging(self, size: int) -> torch.Tensor:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("CUDA error: out of memory")
            return super().staging(size)

    good, least = budgets(checkpoint, "disk"), DevicePlan(sizes_in(checkpoint), ("disk",) * LAYERS)
    for wrong, message in (
        ({"weights_memory_bytes": least.device_bytes - 1}, f"expected at least {least.device_bytes} bytes"),
        ({"weights_host_memory_bytes": least.host_bytes - 1}, f"least {least.host_bytes} bytes, with 6 of"),
    ):
        with pytest.raises(InvalidRequest, match=message), engine(checkpoint, LateDevice(), **{**good, **wrong}):
            pass
    device = Short()
    with pytest.raises(EngineFault, match="host does not pin"), engine(checkpoint, device, **good):
        pass
    device.left = 3
    refused = f"weights_host_memory_bytes: the host does not pin {least.host_bytes} bytes: CUDA error"
    with pytest.raises(InvalidRequest, match=refused), engine(checkpoint, device, **good):
        pass
    with pytest.raises(InvalidRequest, match="null without weights_memory_bytes"):
        EngineConfig(weights_host_memory_bytes=1)
    with pytest.raises(InvalidRequest, match="it is for GPUs only"):
        Engine(checkpoint, threads=1, weights_cache=str(checkpoint.parent), **good)


# The least that int4 tiles hold.
SHAPE = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip


def test_an_engine_of_these_kernels_does_what_fit_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels over one buffer and the other; the plan that is told of a card is the one that is made."""
    monkeypatch.setattr(device_speed, "_ROUNDS", 2)
    folder = build_gptq(tmp_path / "model", "qwen2", **SHAPE)
    (tmp_path / "cache").mkdir(mode=0o700)
    found, [place, *_] = inspect_checkpoint(folder), find_table_devices("8.0")
    sizes = fit_model(found, place, FitWorkload(64, 1, weights_memory_bytes=AMPLE)).tiers.sizes
    budgets = {
        "weights_memory_bytes": DevicePlan(sizes, ("host",) * 3).device_bytes,
        "weights_host_memory_bytes": AMPLE,
    }
    told = fit_model(found, place, FitWorkload(64, 1, **budgets))
    settings: dict[str, Any] = {"dtype": "float16", "threads": 1, "kv_memory_bytes": 2**20, "graphs": False}
    prompt = (3, 141, 59)
    logits = []
    for tiers in ({}, budgets):
        made = Engine(
            folder, ops=GpuOps(interpreter_context((8, 0))), accelerator=LateDevice(recorded=False), **settings,
            weights_cache=str(tmp_path / "cache"), **tiers,
        )  # fmt: skip
        logits.append(made._built.logits(prompt))
    assert torch.equal(*logits)
    assert tier_of(made).plan == told.tiers
    assert told.tiers.on("host") == (0, 1, 2)
    copied = told.tiers.copied_bytes / told.expected.copies_per_s
    assert max(copied, told.expected.compute_s) <= told.expected.step_s <= copied + told.expected.compute_s
    assert told.parts.graphs == 0
    assert told.parts.loaded <= budgets["weights_memory_bytes"]
    least = DevicePlan(sizes, ("disk",) * 3).host_bytes
    slower = fit_model(found, place, FitWorkload(64, 1, **{**budgets, "weights_host_memory_bytes": least}))
    assert slower.tiers.on("disk") == (0, 1, 2)
    assert slower.expected is None, "a disk is in no table"
