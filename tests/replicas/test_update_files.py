"""New weights for a model: what a file of them must be, and that the model then is what a fresh load would give."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from awq_files import build_awq
from decoder_steps import Session, exact_ops
from fp8_files import build_fp8
from gptq_files import build_gptq
from new_weights import changed, of_another, tensors_of, written
from tiny_checkpoints import build_checkpoint

from motley.replicas.checkpoint.cache import weights_cache
from motley.replicas.checkpoint.cache.weights_cache import WeightsCache
from motley.replicas.errors import CheckpointError, InvalidRequest, MotleyError, Unavailable
from motley.replicas.loading.model_loader import LoadedModel, load_model
from motley.replicas.updates import update_staging
from motley.replicas.updates.live_weights import LiveWeights
from motley.replicas.updates.process_folder import (
    create_process_folder,
    process_folder_exists,
    release_process_folder,
)
from motley.replicas.updates.weight_file import WeightFile

PROMPT = [7, 3, 200, 41, 41, 90, 5, 250]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# A model, and another of the same shape with other values.
PAIRS: dict[str, Callable[[Path, int], Path]] = {
    "dense": lambda folder, seed: build_checkpoint(folder, "qwen3", seed=seed),
    "tied": lambda folder, seed: build_checkpoint(folder, "qwen2", seed=seed, tie_word_embeddings=True),
    "gptq": lambda folder, seed: build_gptq(folder, "qwen2", seed=seed, sym=False),
    "gptq, desc_act": lambda folder, seed: build_gptq(folder, seed=seed, desc_act=True, shared_order=False),
    "awq": lambda folder, seed: build_awq(folder, seed=seed)[0],
    "fp8": lambda folder, seed: build_fp8(folder, seed=seed)[0],
}
# Parts of several layers are fused: q alone, or gate alone, must find the others as they were.
SOME: dict[str, Callable[[str], bool]] = {
    "q of a layer": lambda name: "layers.1.self_attn.q_proj." in name,
    "gate, down, and norms": lambda name: any(part in name for part in ("0.mlp.gate", "1.mlp.down", "norm")),
    "embedding and head": lambda name: name in (EMBEDDING, HEAD),
    "all": lambda name: True,
}


def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, exact_ops())


def tokens(model: LoadedModel) -> tuple[list[int], torch.Tensor]:
    return Session(model.decoder).greedy(PROMPT, 12)


def check_alike(found: LoadedModel, folder: Path) -> None:
    """To the bit what that checkpoint gives, and its fingerprint."""
    fresh = loaded(folder)
    (ids, logits), (expected_ids, expected) = tokens(found), tokens(fresh)
    assert ids == expected_ids
    assert torch.equal(logits, expected)
    assert found.fingerprint == fresh.fingerprint
    assert found.weight_bytes == fresh.weight_bytes


@pytest.mark.parametrize("some", SOME)
@pytest.mark.parametrize("name", PAIRS)
def test_it_is_what_a_fresh_load_gives(name: str, some: str, tmp_path: Path) -> None:
    folder, other = PAIRS[name](tmp_path / "one", 0), PAIRS[name](tmp_path / "two", 1)
    new = of_another(folder, other, SOME[some])
    live = LiveWeights(loaded(folder))
    before, was = live.loaded, tokens(live.loaded)
    prepared = live.prepare(WeightFile(written(tmp_path / "new.safetensors", new)), expected=0)
    assert (live.version, live.loaded) == (0, before)
    assert torch.equal(tokens(before)[1], was[1])
    live.adopt(prepared)
    assert live.version == 1
    check_alike(live.loaded, changed(folder, new, tmp_path / "changed"))
    assert not torch.equal(tokens(live.loaded)[1], was[1])
    live.close()


@pytest.mark.parametrize("name", PAIRS)
def test_weights_that_were_kept_from_an_earlier_start_are_updated_alike(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has been read of the checkpoint: what has not changed is what was kept, and so is its digest."""
    monkeypatch.setattr(weights_cache, "RACY_S", 0.0)
    folder, other = PAIRS[name](tmp_path / "one", 0), PAIRS[name](tmp_path / "two", 1)
    (tmp_path / "cache").mkdir(mode=0o700)
    for _ in range(2):
        cache = WeightsCache(tmp_path / "cache", min_bytes=0)
        kept = load_model(folder, exact_ops(), cache=cache)
        cache.wait()
    new = of_another(folder, other, SOME["q of a layer"])
    live = LiveWeights(kept)
    live.adopt(live.prepare(WeightFile(written(tmp_path / "new.safetensors", new)), expected=0))
    check_alike(live.loaded, changed(folder, new, tmp_path / "changed"))
    live.close()


def test_parts_that_have_not_changed_are_shared(tmp_path: Path) -> None:
    folder, other = PAIRS["gptq"](tmp_path / "one", 0), PAIRS["gptq"](tmp_path / "two", 1)
    new = of_another(folder, other, SOME["q of a layer"])
    live = LiveWeights(loaded(folder))
    old = live.loaded.decoder
    made = live.prepare(WeightFile(written(tmp_path / "new.safetensors", new))).loaded.decoder
    assert made.embedding is old.embedding
    assert made.head is old.head
    assert made.layers[0].attention.qkv is old.layers[0].attention.qkv
    assert made.layers[1].mlp.gate_up is old.layers[1].mlp.gate_up
    assert made.layers[1].attention.qkv is not old.layers[1].attention.qkv
    live.close()


def test_updates_follow_each_other_and_the_files_may_go(tmp_path: Path) -> None:
    """q of a fused three, then k, of files that are gone by then; and of copies only those that are read are left."""
    folder, other = PAIRS["dense"](tmp_path / "one", 0), PAIRS["dense"](tmp_path / "two", 1)
    live, expected = LiveWeights(loaded(folder)), folder
    for number, part in enumerate(("q_proj", "k_proj", "_proj")):
        new = of_another(folder, other, lambda name, part=part: f"layers.0.self_attn.{part}" in name or part in name)
        file = written(tmp_path / "new.safetensors", new)
        live.adopt(live.prepare(WeightFile(file), expected=number))
        file.unlink()
        expected = changed(expected, new, tmp_path / f"changed{number}")
        check_alike(live.loaded, expected)
    [own] = live._folders
    assert {path.name for path in own.glob("*.safetensors")} == {"3.safetensors"}
    live.close()
    assert not own.exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_deltas_are_added_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "one", "llama", dtype="bfloat16")
    names = [EMBEDDING, "model.norm.weight", "model.layers.2.mlp.up_proj.weight"]
    deltas = {name: torch.randn(tensors_of(folder)[name].shape).to(dtype) / 8 for name in names}
    live = LiveWeights(loaded(folder))
    live.adopt(live.prepare(WeightFile(written(tmp_path / "new.safetensors", deltas), delta=True)))
    sums = {name: (tensors_of(folder)[name].float() + delta.float()).bfloat16() for name, delta in deltas.items()}
    check_alike(live.loaded, changed(folder, sums, tmp_path / "changed"))
    live.close()


def bad_value(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = next(name for name in tensors if tensors[name].is_floating_point())
    tensors[name].view(-1)[-1] = float("nan")
    return tensors


Q = "model.layers.1.self_attn.q_proj"
WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "unknown": ("dense", lambda old: {"model.layers.9.mlp.up_proj.weight": torch.ones(2)}, "belongs to no part"),
    "shape": ("dense", lambda old: {EMBEDDING: old[EMBEDDING][1:]}, "shape is"),
    "dtype": ("dense", lambda old: {EMBEDDING: old[EMBEDDING].double()}, "dtype is F64"),
    "not finite": ("dense", lambda old: bad_value({EMBEDDING: old[EMBEDDING].clone()}), "not finite"),
    "nothing": ("dense", lambda old: {}, "holds no tensor"),
    "frozen": ("dense", lambda old: {"model.norm.weight": old["model.norm.weight"]}, r"is frozen.*'model\.norm\.\*'"),
    "tied head": ("tied", lambda old: {HEAD: old[EMBEDDING]}, "the head is tied"),
    "codes alone": ("gptq", lambda old: {f"{Q}.qweight": old[f"{Q}.qweight"]}, "without .*qzeros.*scales"),
    "scales alone": ("awq", lambda old: {f"{Q}.scales": old[f"{Q}.scales"]}, "without .*qweight"),
    "codes without scale": ("fp8", lambda old: {f"{Q}.weight": old[f"{Q}.weight"]}, "without .*weight_scale"),
    "scale of zero": (
        "gptq",
        lambda old: {name: 0 * t if name.endswith("scales") else t for name, t in old.items() if f"{Q}." in name},
        "scales that are zero",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_file_changes_nothing(what: str, tmp_path: Path) -> None:
    name, make, message = WRONG[what]
    folder = PAIRS[name](tmp_path / "one", 0)
    live = LiveWeights(loaded(folder), frozen=("model.norm.*",))
    before = live.loaded
    file = written(tmp_path / "new.safetensors", make(tensors_of(folder)))
    with pytest.raises(MotleyError, match=message):
        live.prepare(WeightFile(file))
    assert (live.version, live.loaded) == (0, before)
    assert not [path for folder in live._folders for path in folder.glob("*.safetensors")]
    live.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is full")
def test_a_copy_that_has_no_room_is_no_fault_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_checkpoint(tmp_path / "one", "qwen2")
    live = LiveWeights(loaded(folder))
    file = WeightFile(written(tmp_path / "new.safetensors", tensors_of(folder)))
    monkeypatch.setattr(update_staging, "_created", lambda path: FileIO(os.open("/dev/full", os.O_WRONLY), "wb"))
    with pytest.raises(Unavailable, match="cannot be stored in this host") as refused:
        live.prepare(file)
    assert refused.value.code == "no_room"
    live.close()


def test_deltas_of_a_quantized_layer_are_refused(tmp_path: Path) -> None:
    folder = PAIRS["gptq"](tmp_path / "one", 0)
    live = LiveWeights(loaded(folder))
    whole = {name: tensor for name, tensor in tensors_of(folder).items() if f"{Q}." in name}
    with pytest.raises(CheckpointError, match="nothing can be added"):
        live.prepare(WeightFile(written(tmp_path / "new.safetensors", whole), delta=True))
    live.close()


@pytest.mark.parametrize(
    ("dtype", "added", "problem"), [("float16", 1e5, "not finite"), ("bfloat16", 3e38, "too large")]
)
def test_a_sum_that_overflows_is_refused(dtype: str, added: float, problem: str, tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "one", dtype=dtype)
    live = LiveWeights(loaded(folder))
    most = {"model.norm.weight": torch.full((64,), added)}
    with pytest.raises(CheckpointError, match=rf"new\.safetensors · model\.norm\.weight.*{problem}"):
        live.prepare(WeightFile(written(tmp_path / "new.safetensors", most), delta=True))
    live.close()


def test_a_stored_copy_of_a_tied_head_changes_with_the_embedding(tmp_path: Path) -> None:
    folder = PAIRS["tied"](tmp_path / "one", 0)
    own = tensors_of(folder)[EMBEDDING]
    written(folder / "model.safetensors", {**tensors_of(folder), HEAD: own.clone()})
    live = LiveWeights(loaded(folder))

    def prepare(tensors: dict[str, torch.Tensor]) -> None:
        live.adopt(live.prepare(WeightFile(written(tmp_path / "new.safetensors", tensors))))

    with pytest.raises(CheckpointError, match="change both"):
        prepare({EMBEDDING: 2 * own})
    with pytest.raises(CheckpointError, match="differs from"):
        prepare({EMBEDDING: 2 * own, HEAD: own.clone()})
    prepare({EMBEDDING: 2 * own, HEAD: 2 * own})
    check_alike(live.loaded, changed(folder, {EMBEDDING: 2 * own, HEAD: 2 * own}, tmp_path / "changed"))
    live.close()


def test_another_version_is_refused(tmp_path: Path) -> None:
    folder = PAIRS["dense"](tmp_path / "one", 0)
    live = LiveWeights(loaded(folder))
    file = written(tmp_path / "new.safetensors", {EMBEDDING: tensors_of(folder)[EMBEDDING]})
    with pytest.raises(InvalidRequest, match="weights are of version 0") as refused:
        live.prepare(WeightFile(file), expected=1)
    assert refused.value.code == "version_mismatch"
    live.close()


@pytest.mark.parametrize("length", [4, 100, -1])
def test_a_file_cut_short_is_refused(length: int, tmp_path: Path) -> None:
    folder = PAIRS["dense"](tmp_path / "one", 0)
    live = LiveWeights(loaded(folder))
    file = written(tmp_path / "new.safetensors", {EMBEDDING: tensors_of(folder)[EMBEDDING]})
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(CheckpointError, match="truncated"):
        live.prepare(WeightFile(file))
    live.close()


def test_a_model_that_was_made_up_is_refused(tmp_path: Path) -> None:
    live = LiveWeights(replace(loaded(PAIRS["dense"](tmp_path / "one", 0)), checkpoint=None))
    with pytest.raises(InvalidRequest, match="motley fleet roll"):
        live.prepare(WeightFile(tmp_path / "new.safetensors"))


def test_what_a_process_that_was_killed_has_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of one that lives."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os; from motley.replicas.updates.process_folder import create_process_folder; "
        "print(create_process_folder(), flush=True); "
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    killed = subprocess.run(
        [sys.executable, "-c", code + "os._exit(1)"], capture_output=True, text=True, env=environment, check=False
    )
    left = Path(killed.stdout.strip())
    assert left.is_dir()
    living = create_process_folder()
    assert not left.exists()
    other = create_process_folder()
    assert living.is_dir()
    for folder in (living, other):
        release_process_folder(folder)
    assert not list(tmp_path.glob("motley-weights-*"))


def test_a_folder_that_another_process_removes_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock was there, and nobody held it yet: it looked like what one that was killed has left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    flock, removed = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not removed:
            [found] = tmp_path.iterdir()
            removed.append(found)
            shutil.rmtree(found)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    folder = create_process_folder()
    assert removed != [folder]
    assert process_folder_exists(folder)
    release_process_folder(folder)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("gone", ["all of it", "its lock"])
def test_when_the_folder_has_gone_updates_go_on(gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    folder, other = (PAIRS["dense"](tmp_path / part, seed) for seed, part in enumerate(("one", "two")))
    live = LiveWeights(loaded(folder))
    for version, part in enumerate(("mlp", "q_proj"), 1):
        new = of_another(folder, other, lambda name, part=part: part in name)  # type: ignore[misc]
        live.adopt(live.prepare(WeightFile(written(tmp_path / f"{version}.safetensors", new))))
        folder = changed(folder, new, tmp_path / f"changed{version}")
        [own] = (one for one in temporary.iterdir() if process_folder_exists(one))
        shutil.rmtree(own) if gone == "all of it" else (own / "lock").unlink()
    assert live.version == 2
    assert live.loaded.fingerprint == loaded(folder).fingerprint
    live.close()
    assert not list(temporary.iterdir())
