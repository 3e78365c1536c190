"""New weights for a model in tiers of a device with memory of its own: what a fresh load of the changed checkpoint
would say, each version through buffers of its own, within the budgets, and nothing left of those before.
"""

from __future__ import annotations

import gc
import itertools
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_tiers import AMPLE, LAYERS, budgets, engine, tier_of
from engine_driver import drive
from gptq_files import build_gptq
from late_device import LateDevice, storages
from new_weights import changed, of_another, tensors_of, written
from thorough import thorough
from threads_by_name import thread_names
from tiny_checkpoints import build_checkpoint

from motley.kernels.device.device_context import interpreter_context
from motley.kernels.gpu.gpu_ops import GpuOps
from motley.replicas.capacity import kv_sizing
from motley.replicas.checkpoint.cache import weights_cache
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import InvalidRequest, MotleyError, Unavailable
from motley.replicas.execution.swapper import round_up_to_power_of_two
from motley.replicas.offload.device import device_speed, pinned_memory
from motley.replicas.offload.planning.disk_plan import WeightBudgets
from motley.replicas.offload.renewal import device_renewal
from motley.replicas.types import Request, SamplingParams, StreamMessage
from motley.replicas.updates.device_update import update_bytes
from motley.replicas.updates.weight_file import WeightFile

APART, MIDWAY = 4, 6  # steps from one request to the next, and after which the weights change: two have begun


@pytest.fixture(autouse=True)
def _times_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of these tests were written this very moment."""
    monkeypatch.setattr(weights_cache, "RACY_S", 0.0)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two of one shape."""
    one, two = (
        build_checkpoint(tmp_path / part / "model", "qwen3", seed=seed, num_hidden_layers=LAYERS)
        for seed, part in enumerate(("one", "two"))
    )
    return one, two


def request(number: int) -> Request:
    params = SamplingParams(max_tokens=20, temperature=0.0, seed=7, ignore_eos=True, logprobs=1)
    return Request("r", (*range(3, 40), number), params)


ASKED = [request(number) for number in range(4)]


def said(messages: list[StreamMessage]) -> list[Any]:
    """To the bit."""
    deltas = [delta for message in messages for delta in message.deltas]
    return [(token, delta.logprobs) for delta in deltas for token in delta.token_ids]


def every(made: Engine, each: Callable[[], None] = lambda: None) -> list[Any]:
    return [said(messages) for messages in drive(made._built.core, ASKED, apart=APART, each=each)]


def whole(folder: Path) -> tuple[list[Any], str]:
    """Return the output of an engine with all of it on the device."""
    with engine(folder, LateDevice(), weights_cache="off") as made:
        return every(made), made._built.profile.fingerprint


Wanted = Callable[[str], bool]


def new_file(folders: tuple[Path, Path], name: str, wanted: Wanted, base: Path) -> tuple[WeightFile, Path]:
    """Write a file of the second's tensors, and the checkpoint that the first would be with them."""
    new = of_another(*folders, wanted)
    path = written(base / f"{name}.safetensors", new)
    return WeightFile(path), changed(folders[0], new, base / name / "model")


def midway(work: Callable[[], None]) -> Callable[[], None]:
    steps = itertools.count()

    def each() -> None:
        if next(steps) == MIDWAY:
            work()

    return each


def adopted(made: Engine, file: WeightFile) -> None:
    weights = made._built.weights
    assert weights is not None
    made._built.adopt(weights.prepare(file))


def open_files(cache: Path) -> list[str]:
    found = [str(path) for path in cache.rglob("*") if path.is_file()]
    for each in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(each))
        except OSError:
            continue
    return sorted(name for name in found if name.startswith(str(cache)))


@pytest.mark.slow("Four engines answer, one of them through two updates on the way")
@pytest.mark.covering
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("kind", ["host", "disk", "both"])
def test_each_ends_on_the_weights_that_it_began_with(
    folders: tuple[Path, Path], tmp_path: Path, kind: str, early: bool
) -> None:
    """Step by step with the other, each brings its own layers. Again, since the next is made of what the first has
    left: of some layers whole, of parts of one that stays, of norms alone.
    """
    first, once = new_file(folders, "first", lambda name: "embed" not in name and ".layers.5." not in name, tmp_path)
    parts = ("layers.2.mlp", "layers.3.", "layers.5.self_attn", "layers.4.input_layernorm", "model.norm", "embed")
    third = build_checkpoint(tmp_path / "three", "qwen3", seed=2, num_hidden_layers=LAYERS)
    second, twice = new_file((once, third), "second", lambda name: any(part in name for part in parts), tmp_path)
    old, (new, _), (last, fingerprint) = whole(folders[0])[0], whole(once), whole(twice)
    assert all(len({str(each) for each in three}) == 3 for three in zip(old, new, last, strict=True))
    device, settings = LateDevice(early=early), budgets(folders[0], kind)
    with engine(folders[0], device, **settings) as made:
        assert made._built.weights is not None
        threads = thread_names()
        plan = tier_of(made).plan
        for file, before, after in ((first, old, new), (second, new, last)):
            decoder = weakref.ref(made._built.weights.loaded.decoder)
            tier = weakref.ref(tier_of(made))
            both: list[list[int]] = []

            def update(file: WeightFile = file, both: list[list[int]] = both) -> None:
                waits = device.waits
                adopted(made, file)
                assert device.waits == waits
                both.append(list(made._built.runner.models))

            gc.disable()
            try:
                found = every(made, midway(update))
                assert (decoder(), tier()) == (None, None)
            finally:
                gc.enable()
            assert found == [*before[:2], *after[2:]]
            assert len(both[0]) == 2
            assert every(made) == after
            assert thread_names() <= threads
        assert made._built.profile.fingerprint == fingerprint
        assert tier_of(made).plan == plan
        assert tier_of(made).expected is not None
        assert len(made._built.runner.models) == 1


@pytest.mark.slow("Two updates in tiers, then a fresh load of the changed checkpoint")
@pytest.mark.parametrize("kind", ["host", "both"])
def test_what_is_added_is_added_to_every_tier(folders: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    folder = folders[0]
    with engine(folder, LateDevice(), **budgets(folder, kind)) as made:
        for number in range(2):
            delta = {name: tensor * 0.25 for name, tensor in tensors_of(folder).items() if "mlp" in name}
            adopted(made, WeightFile(written(tmp_path / f"{number}.safetensors", delta), delta=True))
            now = tensors_of(folder)
            new = {name: (now[name].float() + tensor.float()).to(now[name].dtype) for name, tensor in delta.items()}
            folder = changed(folder, new, tmp_path / f"changed{number}" / "model")
        assert every(made) == whole(folder)[0]


def test_a_head_that_is_the_embedding_stays_it(tmp_path: Path) -> None:
    folders = tuple(
        build_checkpoint(
            tmp_path / part / "model", "qwen2", seed=seed, num_hidden_layers=LAYERS, tie_word_embeddings=True
        )
        for seed, part in enumerate(("one", "two"))
    )
    file, after = new_file(folders, "new", lambda name: "embed" in name or "layers.1." in name, tmp_path)  # type: ignore[arg-type]
    with engine(folders[0], LateDevice(), **budgets(folders[0], "host")) as made:
        adopted(made, file)
        assert every(made) == whole(after)[0]


@pytest.mark.slow("Five engines are built, and four updates adopted")
def test_layers_stay_pinned_as_far_as_the_budget_goes(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unchanged layers are shared with ample memory; without, all is pinned anew rather than what slabs held before
    kept beside it. Either way no more than the budget is pinned of the weights that are left.
    """
    monkeypatch.setattr(pinned_memory, "SLAB_BYTES", 1 << 16)
    monkeypatch.setattr("motley.replicas.execution.swapper.SLAB_BYTES", 1 << 16)
    shared = []
    for kind, host in (("ample", AMPLE), ("exact", None)):
        folder = folders[0]
        settings = {**budgets(folder, "host"), "weights_host_memory_bytes": AMPLE}
        if host is None:
            with engine(folder, LateDevice(), **settings) as made:
                settings["weights_host_memory_bytes"] = tier_of(made).plan.host_bytes
        with engine(folder, LateDevice(), **settings) as made:
            for layer in (1, 3):
                before = dict(tier_of(made).pinned)
                assert tier_of(made).plan.on("host") == tuple(sorted(before)) == tuple(range(LAYERS))
                named = f"{kind}{layer}"
                file, folder = new_file((folder, folders[1]), named, lambda name: f"layers.{layer}." in name, tmp_path)  # noqa: B023
                adopted(made, file)
                now = tier_of(made).pinned
                slabs = [piece.untyped_storage() for each in now.values() for piece in each]
                taken = sum(map(round_up_to_power_of_two, {slab.data_ptr(): slab.nbytes() for slab in slabs}.values()))
                assert taken <= settings["weights_host_memory_bytes"]
                shared.append([each for each in sorted(now) if now[each] is before[each]])
            assert every(made) == whole(folder)[0]
    assert shared == [[0, 2, 3, 4, 5], [0, 1, 2, 4, 5], [], []]


class Short(LateDevice):
    """Pins so much more, in pieces. left: None: all that is wanted."""

    left: int | None = None

    def staging(self, size: int) -> torch.Tensor:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("CUDA error: out of memory")
        return super().staging(size)


@pytest.mark.slow("An update to tiers fails in a dozen ways before one succeeds")
@pytest.mark.parametrize("kind", ["both", *thorough("host")])
def test_a_failed_update_leaves_everything_as_it_was(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A byte less than is reckoned of the device; memory that runs out there, on the host or on disk; budgets that the
    new weights alone would be beyond. Nothing is kept of what was made until then. With enough the update succeeds.
    """
    file, after = new_file(folders, "new", lambda name: ".mlp." in name, tmp_path)
    device, settings = Short(), budgets(folders[0], kind)
    with engine(folders[0], device, **settings) as made:
        built = made._built
        assert built.weights is not None
        live, loaded, tier = built.weights, built.weights.loaded, tier_of(made)
        given = {"dtype": "float32", "threads": 1, "kv_memory_bytes": 2**20, "graphs": False}
        config = EngineConfig(**given, **settings)  # type: ignore[arg-type]
        needed = update_bytes(loaded.decoder, of_another(*folders, lambda name: ".mlp." in name).keys())
        needed += kv_sizing.largest_step_bytes(config, loaded)

        def runs_out(*_: Any, **__: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        def refused(error: type[MotleyError], what: str) -> None:
            with pytest.raises(error, match=what) as met:
                live.prepare(file)
            assert met.value.code == "no_room" or met.value.param in what

        def fail() -> None:
            device.mark().wait()  # of steps on their way nothing more comes meanwhile
            device.copy(lambda: None).wait()
            gc.collect()
            there = set(storages()), thread_names(), open_files(tmp_path / "one" / "cache")
            device.free = needed - 1
            refused(Unavailable, "the new weights need")
            device.free = needed
            for left in range(2 + 2 * (kind == "both") + 1):
                device.left = left
                refused(Unavailable, "no memory could be pinned for the new weights: CUDA error")
            device.left = None
            less = WeightBudgets(tier.plan.device_bytes - 1, AMPLE), WeightBudgets(AMPLE, tier.plan.host_bytes - 1)
            for where, name, value, error, what in (
                (device_renewal, "available_memory", lambda: 2**16, Unavailable, "need .* of it pinned"),
                (weights_cache, "FREE_SHARE", 1.0, Unavailable, "weights cache has no room"),
                (tier, "budgets", less[0], InvalidRequest, "weights_memory_bytes"),
                (tier, "budgets", less[1], InvalidRequest, "weights_host_memory_bytes"),
                (loaded.decoder.ops, "linear", runs_out, Unavailable, "out of memory"),
                (loaded.decoder.ops, "restored", runs_out, Unavailable, "out of memory"),
            ):
                with monkeypatch.context() as patch:
                    patch.setattr(where, name, value)
                    refused(error, what)  # type: ignore[arg-type]
            gc.collect()
            assert set(storages()) <= there[0]
            assert thread_names() <= there[1]
            assert open_files(tmp_path / "one" / "cache") == there[2]
            assert (live.version, live.loaded, list(built.runner.models)) == (0, loaded, [0])

        old = every(made)
        assert every(made, midway(fail)) == old
        device.left = None
        adopted(made, file)
        assert every(made) == whole(after)[0]


def test_what_is_dropped_leaves_nothing(folders: tuple[Path, Path], tmp_path: Path) -> None:
    file, _ = new_file(folders, "new", lambda name: ".mlp." in name, tmp_path)
    with engine(folders[0], LateDevice(), **budgets(folders[0], "both")) as made:
        assert made._built.weights is not None
        threads, files = thread_names(), open_files(tmp_path / "one" / "cache")
        made._built.weights.drop(made._built.weights.prepare(file))
        gc.collect()
        assert thread_names() <= threads
        assert open_files(tmp_path / "one" / "cache") == files


# The least that int4 tiles hold.
SHAPE = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip


@pytest.mark.thorough
def test_int4_layers_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels compute over the buffers of either version: logits are those of the changed checkpoint."""
    monkeypatch.setattr(device_speed, "_ROUNDS", 2)
    (tmp_path / "cache").mkdir(mode=0o700)
    one, two = (build_gptq(tmp_path / part, "qwen2", seed=seed, **SHAPE) for seed, part in enumerate(("one", "two")))
    file, after = new_file((one, two), "new", lambda name: "layers.0.mlp" in name or "layers.2." in name, tmp_path)
    settings: dict[str, Any] = {"dtype": "float16", "threads": 1, "kv_memory_bytes": 2**20, "graphs": False}
    found = []
    for folder, tiers in ((after, {}), (one, {"weights_memory_bytes": 311_000, "weights_host_memory_bytes": AMPLE})):
        made = Engine(
            folder, ops=GpuOps(interpreter_context((8, 0))), accelerator=LateDevice(recorded=False), **settings,
            weights_cache=str(tmp_path / "cache"), **tiers,
        )  # fmt: skip
        if tiers:
            assert len(tier_of(made).plan.on("host")) >= 2
            found.append(made._built.logits((3, 141, 59)))
            adopted(made, file)
        found.append(made._built.logits((3, 141, 59)))
        made.close()
    new, old, updated = found
    assert torch.equal(updated, new)
    assert not torch.equal(old, new)
