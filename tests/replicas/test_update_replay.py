"""A replica that begins after many updates has what all of them give, and reads no more of them than that takes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_steps import Session, exact_ops
from hypothesis import given, settings
from hypothesis import strategies as st
from new_weights import changed, tensors_of, written
from safetensors.torch import load_file
from tiny_checkpoints import build_checkpoint

from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import CheckpointError, MotleyError
from motley.replicas.loading.model_loader import load_model
from motley.replicas.types import Request, SamplingParams, StreamMessage
from motley.replicas.updates.live_weights import LiveWeights
from motley.replicas.updates.update_replay import updates_to_replay
from motley.replicas.updates.weight_file import WeightFile

NORM, GATE, HEAD = "model.norm.weight", "model.layers.0.mlp.gate_proj.weight", "lm_head.weight"
NAMES = (NORM, GATE, HEAD)
CONFIG = EngineConfig(dtype="float32", kv_memory_bytes=1 << 22, threads=1)


def file(names: str, *, delta: bool = False) -> WeightFile:
    """One letter is one tensor."""
    return WeightFile(Path(names), delta, f"after {names}")


def kept(*files: WeightFile, changeable: str = "abc") -> list[str]:
    return [str(one.path) for one in updates_to_replay(files, changeable, lambda path: set(str(path)))]


def test_what_later_ones_replace_is_not_needed() -> None:
    assert kept() == []
    assert kept(file("a")) == ["a"]
    assert kept(file("a"), file("a")) == ["a"]
    assert kept(file("ab"), file("a")) == ["ab", "a"]
    assert kept(file("ab"), file("a"), file("b")) == ["a", "b"]
    assert kept(file("ab"), file("ab", delta=True), file("a")) == ["ab", "ab", "a"]
    assert kept(file("a"), file("a", delta=True), file("a"), file("a", delta=True)) == ["a", "a"]


def test_what_comes_before_all_is_replaced_is_not_looked_at() -> None:
    def names_of(path: Path) -> set[str]:
        assert str(path) != "gone"
        return set(str(path))

    found = updates_to_replay([file("gone"), file("ab"), file("c"), file("a", delta=True)], "abc", names_of)
    assert [str(one.path) for one in found] == ["ab", "c", "a"]


def test_the_last_alone_is_held_to_its_contents_if_any_is_missing() -> None:
    files = [file("a"), file("b"), file("a")]
    assert [one.contents for one in updates_to_replay(files, "abc", lambda path: set(str(path)))] == ["", "after a"]
    whole = [file("a"), file("b")]
    assert updates_to_replay(whole, "abc", lambda path: set(str(path))) == whole


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sets(st.sampled_from("abc"), min_size=1), st.booleans()), max_size=12))
def test_they_give_what_all_of_them_give(steps: list[tuple[set[str], bool]]) -> None:
    """Each tensor has its history since its last whole value; and none is kept that changes nothing."""
    files = [
        WeightFile(Path(f"{number}{''.join(sorted(names))}"), delta) for number, (names, delta) in enumerate(steps)
    ]

    def names_of(path: Path) -> set[str]:
        return set(str(path)) & set("abc")

    def history(taken: list[WeightFile]) -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = {name: [] for name in "abc"}
        for one in taken:
            for name in names_of(one.path):
                found[name] = [*(found[name] if one.delta else []), one.path]
        return found

    taken = updates_to_replay(files, "abc", names_of)
    assert history(taken) == history(files)
    used = {path for paths in history(files).values() for path in paths}
    assert {one.path for one in taken} == used


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model") / "one", "qwen3")


class History:
    """Updates of a checkpoint, one after the other, and what the model is after each."""

    def __init__(self, folder: Path, place: Path) -> None:
        self.folder, self.place = folder, place
        self.now = tensors_of(folder)
        self.files: list[WeightFile] = []
        self.live = LiveWeights(load_model(folder, exact_ops()))
        self._random = torch.Generator().manual_seed(5)

    def update(self, *names: str, delta: bool = False) -> None:
        new = {name: torch.randn(self.now[name].shape, generator=self._random) / 8 for name in names}
        of = {name: tensor.to(self.now[name].dtype) for name, tensor in new.items()}
        one = WeightFile(written(self.place / f"{len(self.files)}.safetensors", of), delta)
        self.live.adopt(self.live.prepare(one))
        self.files.append(replace(one, contents=self.live.loaded.fingerprint))
        added = {name: (self.now[name].float() + of[name].float()).to(of[name].dtype) for name in names}
        self.now |= added if delta else of


@pytest.fixture
def history(folder: Path, tmp_path: Path) -> History:
    found = History(folder, tmp_path)
    found.update(NORM, GATE)
    found.update(GATE, delta=True)
    found.update(NORM, delta=True)
    found.update(HEAD)
    found.update(NORM)
    found.update(GATE)
    found.update(GATE, delta=True)
    found.update(NORM, delta=True)
    return found


def replayed(folder: Path, files: list[WeightFile]) -> LiveWeights:
    live = LiveWeights(load_model(folder, exact_ops()))
    for prepared in live.replay(files):
        live.adopt(prepared)
    return live


def logits(live: LiveWeights) -> torch.Tensor:
    return Session(live.loaded.decoder).greedy([7, 3, 200, 41], 8)[1]


def test_the_weights_are_the_same_to_the_bit(history: History, tmp_path: Path) -> None:
    for skipped in history.files[:3]:
        skipped.path.write_bytes(skipped.path.read_bytes()[:-8] + b"8 others")  # of these headers alone are looked at
    late = replayed(history.folder, history.files)
    fresh = load_model(changed(history.folder, history.now, tmp_path / "changed"), exact_ops())
    assert late.version == 5
    assert late.status() == history.live.status()
    assert late.status().version == 8
    assert late.loaded.fingerprint == fresh.fingerprint == history.live.loaded.fingerprint
    assert torch.equal(logits(late), logits(history.live))
    assert late.prepare(WeightFile(history.files[-1].path), expected=8).version == 6
    with pytest.raises(MotleyError, match="weights are of version 8"):
        late.prepare(WeightFile(history.files[-1].path), expected=5)
    for live in (late, history.live):
        live.close()


class Noted:
    """Other ranks, each of whose versions is made of the one before."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    def prepare(self, version: int, file: Path) -> None:
        self.versions.append(version)

    def forget(self, version: int) -> None:
        raise AssertionError


def test_other_ranks_make_each_version_of_the_one_before(history: History) -> None:
    others = Noted()
    late = LiveWeights(load_model(history.folder, exact_ops()), others=others)
    for prepared in late.replay(history.files):
        late.adopt(prepared)
    assert others.versions == [1, 2, 3, 4, 5]
    for live in (late, history.live):
        live.close()


def test_files_that_have_been_replaced_altogether_may_be_gone(history: History) -> None:
    history.update(*history.now)
    history.update(NORM, delta=True)
    for gone in history.files[:-2]:
        gone.path.unlink()
    late = replayed(history.folder, history.files)
    assert late.status() == history.live.status()
    for live in (late, history.live):
        live.close()


@pytest.mark.parametrize("which", [3, 5])
def test_a_file_that_is_not_what_it_was_is_still_refused(history: History, which: int) -> None:
    path = history.files[which].path
    written(path, {name: tensor + 1 for name, tensor in load_file(path).items()})
    with pytest.raises(CheckpointError, match="has changed since other replicas read it"):
        replayed(history.folder, history.files)
    history.live.close()


@pytest.fixture
async def late(history: History) -> AsyncIterator[Worker]:
    worker = Worker(history.folder, CONFIG, updates=lambda: history.files)
    await worker.start()
    yield worker
    await worker.close()


async def test_a_worker_counts_all_of_them(history: History, late: Worker) -> None:
    """In what it says of itself, in its messages, and in what it is asked next."""
    told = history.live.status()
    assert late.weights == told
    asked = Request("r", tuple(range(3, 20)), SamplingParams(max_tokens=2, temperature=0.0, seed=0, ignore_eos=True))
    messages: list[StreamMessage] = [message async for message in late.generate(asked)]
    assert [message.weights_status for message in messages if message.weights_status is not None] == [told]
    for load in (late.load(), messages[-1].load):
        assert load is not None
        assert (load.weights_version, load.weights_contents) == (told.version, told.contents)
    next_one: dict[str, Any] = {"file": WeightFile(history.files[0].path), "expected": told.version}
    assert await late.update_weights(**next_one) == told.version + 1
    assert late.weights.version == told.version + 1
