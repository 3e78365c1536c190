"""New weights on a device that does everything as late as it may: what has begun, graphs, and where room is short."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from awq_files import build_awq
from engine_driver import drive
from fp8_files import build_fp8
from gptq_files import build_gptq
from late_device import LateDevice, LateOps, storages
from new_weights import changed, of_another, tensors_of, written
from tiny_checkpoints import build_checkpoint
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from motley.kernels.device.device_context import interpreter_context
from motley.kernels.gpu.gpu_ops import GpuOps
from motley.replicas.capacity import kv_sizing
from motley.replicas.checkpoint.files.safetensors_header import read_header
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.engine.startup import engine_builder
from motley.replicas.engine.startup.engine_builder import BuiltEngine, build_engine
from motley.replicas.engine.startup.engine_rates import EngineRates
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import CheckpointError, Unavailable
from motley.replicas.gpu.decode_graphs import GraphKey
from motley.replicas.gpu.gpu_runner import GpuRunner
from motley.replicas.loading.model_loader import load_model, updated_model
from motley.replicas.types import PROFILED_BATCH_SIZES, Request, SamplingParams, StreamMessage
from motley.replicas.updates import device_update
from motley.replicas.updates.device_update import update_bytes
from motley.replicas.updates.weight_file import WeightFile

CONFIG = EngineConfig(dtype="float32", kv_memory_bytes=1 << 20, threads=1, max_running=4)
PROMPT = tuple(range(3, 60))
APART, MIDWAY = 4, 6  # steps from one request to the next, and after which the weights change: two have begun


def request(**given: Any) -> Request:
    params = {"max_tokens": 30, "temperature": 0.0, "seed": 7, "ignore_eos": True, **given}
    return Request("r", PROMPT, SamplingParams(**params))


# Tokens of graphs, and of logits that graphs leave; the same of what begins afterwards.
ASKED = [request(), request(logprobs=2, temperature=0.8), request(repetition_penalty=1.2), request(logprobs=1)]


def said(messages: list[StreamMessage]) -> list[Any]:
    """To the bit."""
    deltas = [delta for message in messages for delta in message.deltas]
    return [(token, delta.logprobs) for delta in deltas for token in delta.token_ids]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and it with other values in all of its second layer and its last norm."""
    base = tmp_path_factory.mktemp("models")
    one, two = build_checkpoint(base / "one", "qwen2"), build_checkpoint(base / "two", "qwen2", seed=1)
    new = of_another(one, two, lambda name: ".layers.1." in name or name == "model.norm.weight")
    written(base / "new.safetensors", new)
    return one, changed(one, new, base / "changed")


@pytest.fixture
def file(folders: tuple[Path, Path]) -> WeightFile:
    return WeightFile(folders[0].parent / "new.safetensors")


def engine(folder: Path, *, graphs: bool = True) -> tuple[BuiltEngine, LateDevice, GpuRunner]:
    device = LateDevice()
    built = build_engine(folder, replace(CONFIG, graphs=graphs), ops=LateOps(), accelerator=device)
    assert isinstance(built.runner, GpuRunner)
    return built, device, built.runner


def captured(runner: GpuRunner) -> tuple[GraphKey, ...]:
    return () if runner.graphs is None else runner.graphs.captured


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> tuple[list[Any], list[Any]]:
    """Return the output of each checkpoint by itself."""
    old, new = ([said(each) for each in drive(engine(folder)[0].core, ASKED, apart=APART)] for folder in folders)
    assert all(one != other for one, other in zip(old, new, strict=True))
    return old, new


def midway(work: Callable[[], None], core: Any) -> Callable[[], None]:
    """After that step; another is on its way."""
    steps = itertools.count()

    def each() -> None:
        if next(steps) == MIDWAY:
            assert core.launched
            work()

    return each


@pytest.mark.slow("Four requests by each checkpoint alone, then through an update")
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_each_ends_on_the_weights_and_the_graphs_that_it_began_with(
    folders: tuple[Path, Path], file: WeightFile, expected: tuple[list[Any], list[Any]], graphs: bool
) -> None:
    """Steps of both follow each other in the same memory; nobody waits for a step while the new ones are made.

    Nothing of the old is left in the end, by counting references alone: a replica does not look for cycles.
    """
    built, device, runner = engine(folders[0], graphs=graphs)
    assert built.weights is not None
    gone = weakref.ref(built.weights.loaded.decoder)
    versions: list[set[int]] = []

    def update() -> None:
        waits = device.waits
        assert built.weights is not None
        prepared = built.weights.prepare(file, expected=0)
        assert device.waits == waits
        built.adopt(prepared)

    at_its_time = midway(update, built.core)

    def each() -> None:
        at_its_time()
        versions.append({key.weights for key in captured(runner)})

    gc.disable()
    try:
        found = drive(built.core, ASKED, apart=APART, each=each)
        assert gone() is None
    finally:
        gc.enable()
    assert [said(messages) for messages in found] == [*expected[0][:2], *expected[1][2:]]
    assert list(runner.models) == [1]
    if graphs:
        assert (versions[MIDWAY], versions[-1]) == ({0}, {1})
        assert {0, 1} in versions
    assert [messages[0].cached_tokens for messages in found] == [0, 48, 0, 48], "KV of other weights is not found"
    fresh = engine(folders[1])[0]
    assert built.profile.fingerprint == fresh.profile.fingerprint
    for one in (built, fresh):
        one.close()


@pytest.mark.slow("Four requests are answered twice, around updates that fail and succeed")
def test_a_failed_update_leaves_everything_as_it_was(
    folders: tuple[Path, Path],
    file: WeightFile,
    expected: tuple[list[Any], list[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A value that is none, a byte less than is reckoned, memory that runs out on the way: nothing is kept of what was
    made, not even by whoever keeps the error. With that byte, and memory, the update succeeds.
    """
    built, device, runner = engine(folders[0])
    assert built.weights is not None
    live, loaded = built.weights, built.weights.loaded
    norm = tensors_of(folders[0])["model.norm.weight"]
    wrong = WeightFile(written(tmp_path / "wrong.safetensors", {"model.norm.weight": norm * float("nan")}))
    needed = update_bytes(loaded.decoder, read_header(file.path).keys()) + kv_sizing.largest_step_bytes(CONFIG, loaded)
    linear, made = loaded.decoder.ops.linear, itertools.count()

    def runs_out(*given: Any, **named: Any) -> Any:
        if next(made):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return linear(*given, **named)

    def fail() -> None:
        before = set(storages())
        with pytest.raises(CheckpointError, match="not finite"):
            live.prepare(wrong)
        device.free = needed - 1
        with pytest.raises(Unavailable, match="the new weights need") as reckoned:
            live.prepare(file)
        device.free = needed
        with monkeypatch.context() as patch:
            patch.setattr(loaded.decoder.ops, "linear", runs_out)
            with pytest.raises(Unavailable, match="out of memory") as met:
                live.prepare(file)
        assert [each.value.code for each in (reckoned, met)] == ["no_room"] * 2
        gc.collect()
        assert set(storages()) <= before
        assert next(made) == 2, "one was made, and one was not"

    found = drive(built.core, ASKED, apart=APART, each=midway(fail, built.core))
    assert [said(messages) for messages in found] == expected[0]
    assert (live.version, live.loaded, list(runner.models)) == (0, loaded, [0])
    built.adopt(live.prepare(file, expected=0))
    assert [said(messages) for messages in drive(built.core, ASKED, apart=APART)] == expected[1]
    built.close()


def test_an_idle_engine_has_its_graphs_again_when_it_has_other_weights(
    folders: tuple[Path, Path], file: WeightFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_builder, "UPDATE_WARM_UP_S", 60.0)
    built, device, runner = engine(folders[0])
    assert built.weights is not None
    built.rates = lambda core: (EngineRates(1000.0, (0.01,) * len(PROFILED_BATCH_SIZES), 0.0), "reckoned")
    built.warm_up()
    before = set(captured(runner))
    built.adopt(built.weights.prepare(file))
    assert set(captured(runner)) == {key._replace(weights=1) for key in before}
    captures = device.captures
    drive(built.core, ASKED[:2])
    assert device.captures == captures
    built.close()


def test_nothing_that_is_forgotten_is_on_its_way(folders: tuple[Path, Path]) -> None:
    """Whatever has become of its step: a CUDA graph must not go while it is launched, nor weights that are read."""
    built, device, runner = engine(folders[0])
    drive(built.core, ASKED[:1])
    seen: list[Any] = []
    device.submit(lambda: seen.append((list(runner.models), {key.weights for key in captured(runner)})))
    runner.adopt(1, runner.model)
    runner.forget(0)
    assert seen == [([0, 1], {0})]
    assert (list(runner.models), captured(runner)) == ([1], ())
    built.close()


SHAPE = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip


WIDE = {**SHAPE, "intermediate_size": 512, "vocab_size": 32}  # so that the largest part is a linear


class Peak(TorchDispatchMode):
    """most: bytes of tensors that operators were given or gave, at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_flatten(out)[0]:
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: pair for key, pair in self._alive.items() if not pair[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self._alive.values()))
        return out


@pytest.mark.parametrize(
    ("make", "capability"),
    [
        (lambda folder: build_gptq(folder, "qwen2", desc_act=True, shared_order=False, **WIDE), (8, 0)),
        (lambda folder: build_gptq(folder, "llama", bits=8, **WIDE), (6, 1)),
        (lambda folder: build_gptq(folder, "llama", **{**WIDE, "hidden_size": 96}), (8, 0)),
        (lambda folder: build_awq(folder, **WIDE)[0], (7, 5)),
        (lambda folder: build_fp8(folder, **WIDE)[0], (8, 9)),
        (lambda folder: build_checkpoint(folder, "qwen3", **WIDE), (6, 0)),
        (lambda folder: build_checkpoint(folder, "qwen2", tie_word_embeddings=True, **WIDE), (8, 0)),
    ],
    ids=["int4", "int8", "written out", "awq", "fp8", "dense", "tied"],
)
def test_what_is_reckoned_is_no_less_than_what_is_taken(
    make: Callable[[Path], Path], capability: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measures a GPU's operators while all is read and repacked; without what is allowed for gaps, and not four times
    as much.
    """
    monkeypatch.setattr(device_update, "_GAPS_BYTES", 0)
    monkeypatch.setattr(device_update, "_GAPS_SHARE", 1 << 60)
    before = load_model(make(tmp_path), GpuOps(interpreter_context(capability)))
    assert before.checkpoint is not None
    with Peak() as peak:
        made = updated_model(before, before.checkpoint, before.checkpoint.tensors.keys())
    reckoned = update_bytes(before.decoder, before.checkpoint.tensors.keys())
    assert made.decoder.nbytes <= peak.most <= reckoned <= 4 * peak.most


def test_a_gpus_operators_take_other_weights(tmp_path: Path) -> None:
    """int4 in Triton's interpreter, as graphs: afterwards all is as of an engine of the changed checkpoint."""
    one, two = (build_gptq(tmp_path / name, "qwen2", seed=seed, **SHAPE) for seed, name in enumerate(("one", "two")))
    new = of_another(one, two, lambda name: "mlp" in name or name == "model.norm.weight")
    file = WeightFile(written(tmp_path / "new.safetensors", new))
    found = []
    for folder in (one, changed(one, new, tmp_path / "changed")):
        made = Engine(
            folder, dtype="float16", threads=1, max_running=1, ops=GpuOps(interpreter_context((8, 0))),
            accelerator=LateDevice(recorded=False),
        )  # fmt: skip
        built = made._built
        assert built.weights is not None
        params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        found.append(made.generate([[3, 141, 59]], params)[0].outputs)
        if folder == one:
            built.adopt(built.weights.prepare(file))
            found.append(made.generate([[3, 141, 59]], params)[0].outputs)
    old, updated, fresh = ([output.token_ids for output in each] for each in found)
    assert updated == fresh != old
