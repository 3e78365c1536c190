"""Hosts that have a model each under a path: whether it is the same is told before it serves."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_steps import exact_ops
from gptq_files import build_gptq
from new_weights import tensors_of, written
from remote_hosts import Elsewhere, Host
from serve_process import alive, children, command_line
from tiny_checkpoints import build_checkpoint

from motley.replicas.checkpoint.cache import weights_cache
from motley.replicas.checkpoint.cache.weights_cache import WeightsCache
from motley.replicas.engine.startup.engine_builder import BuiltEngine, build_engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import CheckpointError
from motley.replicas.loading.cached_digests import CachedDigests, find_cached_digests
from motley.replicas.loading.digest_assignment import DigestReaders
from motley.replicas.loading.model_loader import load_model
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.model.sharding.stages import pipeline_stages
from motley.replicas.parallel.planning.checkpoint_agreement import (
    CheckpointAgreement,
    cache_shared_digests,
    encode_digests,
)

LAYERS = 3
NORM = "model.layers.0.input_layernorm.weight"


def checkpoint(folder: Path, **more: Any) -> Path:
    return build_checkpoint(folder, "qwen2", num_hidden_layers=LAYERS, **more)


def copied(folder: Path, into: Path, config: Mapping[str, Any] = {}, tensors: Mapping[str, torch.Tensor] = {}) -> Path:
    """Return a copy with other values of some keys and tensors."""
    shutil.copytree(folder, into)
    said = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**said, **config}))
    if tensors:
        written(into / "model.safetensors", {**tensors_of(into), **tensors})
    return into


def of_other_values(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """In the last value alone."""
    tensor = tensors_of(folder)[name].clone()
    tensor.view(-1)[-1] += 1
    return {name: tensor}


@pytest.fixture(autouse=True)
def _files_do_not_change_just_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_cache, "RACY_S", 0.0)


def cache_of(folder: Path) -> WeightsCache:
    """Return the cache of a host, beside its model."""
    (kept := folder.with_suffix(".kept")).mkdir(mode=0o700, exist_ok=True)
    return WeightsCache(kept, min_bytes=0)


class Processes:
    """Stages of one process each, without processes: by the folder that each reads."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._opened = [inspect_checkpoint(folder) for folder in folders]
        self._caches = [cache_of(folder) for folder in folders]
        self.known = [find_cached_digests(one, cache) for one, cache in zip(self._opened, self._caches, strict=True)]
        self._agreement = CheckpointAgreement(self._opened[0], self.known[0], len(folders), 1, near=False)
        self._layers = (*[1] * (len(folders) - 1), LAYERS - len(folders) + 1)
        self._agreement.divide(self._layers)

    def hear(self) -> list[tuple[int, ...] | None]:
        """Return with which other host each finds digests."""
        others = zip(self._opened[1:], self.known[1:], strict=True)
        said = [encode_digests(one, known, self._agreement.leader_digests) for one, known in others]
        self._agreement.hear(json.loads(json.dumps(said)))
        every = [self._agreement.readers(number) for number in range(len(self._opened))]
        assert [each and each.number for each in every] == [each and number for number, each in enumerate(every)]
        return [each and each.processes for each in every]

    def load(self) -> str:
        """The fingerprint. What is to be remembered is."""
        stages = pipeline_stages(LAYERS, self._layers)
        found: list[Sequence[bytes]] = []
        for number in (*range(1, len(self._opened)), 0):
            readers = self._agreement.readers(number)
            known = self.known[number]
            if number:
                fingerprint = "" if readers else self.known[0].fingerprint or known.fingerprint
                known = CachedDigests(fingerprint=fingerprint, readers=readers)
            else:
                known = CachedDigests(known.signature, known.weight_digests, known.fingerprint, readers)
            loaded = load_model(
                self._opened[number].folder, exact_ops(), stage=stages[number], cached_digests=known,
                others=None if number else lambda: self._agreement.own(found), cache=self._caches[number],
            )  # fmt: skip
            if number:
                found.append(loaded.digests)
        for number, row in self._agreement.check(loaded.weight_digests, found).items():
            cache_shared_digests(self._caches[number], self._opened[number], self.known[number], row)
        return loaded.fingerprint


def test_each_host_digests_its_own_files_and_only_once(tmp_path: Path) -> None:
    """All of its processes share that, be they many; and when the files are known nobody reads any for it."""
    folder = checkpoint(tmp_path / "one")
    there = copied(folder, tmp_path / "two")
    first = Processes([folder, there, there])
    assert first.hear() == [(0,), (1, 2), (1, 2)]
    fingerprint = first.load()
    assert fingerprint == load_model(folder, exact_ops()).fingerprint
    again = Processes([folder, there, there])
    assert [known.fingerprint for known in again.known] == [fingerprint] * 3
    assert again.hear() == [None] * 3
    assert again.load() == fingerprint


@pytest.mark.parametrize("known", ["the first", "the other"])
def test_what_one_host_knows_the_other_is_held_to(known: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "one")
    both = [folder, copied(folder, tmp_path / "two")]
    number = ["the first", "the other"].index(known)
    load_model(both[number], exact_ops(), cache=cache_of(both[number]))
    same = Processes(both)
    found = same.hear()
    assert (found[number], found[1 - number]) == (None, (1 - number,))
    assert same.load() == load_model(folder, exact_ops()).fingerprint
    written(both[1] / "model.safetensors", {**tensors_of(both[1]), **of_other_values(both[1], NORM)})
    other = Processes(both)
    other.hear()
    with pytest.raises(CheckpointError, match=f"{both[1]} on {socket.gethostname()} · {NORM}: is of the SHA-256"):
        other.load()


def test_of_one_host_each_knows_its_part_before_others_have_said_anything(tmp_path: Path) -> None:
    """And files that are others by the time that somebody looks are no model's."""
    one = inspect_checkpoint(checkpoint(tmp_path / "one"))
    agreement = CheckpointAgreement(one, CachedDigests(), 3, 1, near=True)
    agreement.divide((1, 1, 1))
    assert [agreement.readers(number) for number in range(3)] == [
        DigestReaders((1, 1, 1), 1, (0, 1, 2), number) for number in range(3)
    ]
    agreement.hear([encode_digests(one, CachedDigests(), agreement.leader_digests)])
    os.utime(one.folder / "model.safetensors", (1, 1))
    with pytest.raises(CheckpointError, match="its files have changed"):
        agreement.hear([encode_digests(one, CachedDigests(), agreement.leader_digests)])


def test_hosts_that_know_different_weights_load_none(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "one")
    there = copied(folder, tmp_path / "two", tensors=of_other_values(folder, NORM))
    for each in (folder, there):
        load_model(each, exact_ops(), cache=cache_of(each))
    both = Processes([folder, there])
    assert all(known.fingerprint for known in both.known)
    with pytest.raises(CheckpointError, match=NORM):
        both.hear()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"rms_norm_eps": 1e-3}, r"config\.rms_norm_eps: is 0\.001; in .* it is 1e-06: "),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, r"config\.rope\.theta: is 500000\.0; in "),
        ({"eos_token_id": 9, "rms_norm_eps": 1e-3}, r"config\.rms_norm_eps: is .*, and 1 more differ"),
    ],
)
def test_another_config_is_told_before_anything_is_loaded(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "one")
    there = copied(folder, tmp_path / "two", config)
    with pytest.raises(CheckpointError, match=f"{there} on {socket.gethostname()} · {said}"):
        Processes([folder, there]).hear()


def test_another_type_of_a_tensor_is_told_likewise(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "one")
    other = {NORM: tensors_of(folder)[NORM].to(torch.bfloat16)}
    there = copied(folder, tmp_path / "two", tensors=other)
    with pytest.raises(CheckpointError, match=rf"{there} on .* · {NORM}: is BF16 \[\d+\]; in .* it is F32 \[\d+\]"):
        Processes([folder, there]).hear()


def test_so_is_another_quantization(tmp_path: Path) -> None:
    """Whose tensors have the same types and shapes."""
    folder = build_gptq(tmp_path / "one", num_hidden_layers=LAYERS)
    there = build_gptq(tmp_path / "two", num_hidden_layers=LAYERS, version="gptq_v2")
    with pytest.raises(CheckpointError, match=f"{there} on .* · quantization: is GPTQ.*zero_offset=0"):
        Processes([folder, there]).hear()


def built(folder: Path, hosts: Sequence[Host], **way: Any) -> BuiltEngine:
    config = EngineConfig(dtype="float32", threads=2, kv_memory_bytes=1 << 20, **way)
    return build_engine(folder, config, launcher=Elsewhere(hosts))


def followers() -> list[int]:
    return [pid for pid in children(os.getpid()) if "remote_hosts" in command_line(pid) and alive([pid])]


STAGES: dict[str, Any] = {"pipeline_parallel": 2, "pipeline_layers": (1, 2)}


@pytest.mark.started
def test_processes_of_two_folders_with_the_same_model_serve_it(tmp_path: Path) -> None:
    """Whose files are cut otherwise, and lie elsewhere."""
    folder = checkpoint(tmp_path / "one", dtype="float32")
    there = copied(folder, tmp_path / "two")
    tensors = tensors_of(there)
    (there / "model.safetensors").unlink()
    written(there / "all.safetensors", dict(reversed(tensors.items())))
    with torch.inference_mode():
        expected = build_engine(folder, EngineConfig(dtype="float32", kv_memory_bytes=1 << 20)).logits((7, 3, 41))
    made = built(folder, [Host(str(there))], **STAGES)
    try:
        assert torch.equal(made.logits((7, 3, 41)), expected)
        assert made.weights is not None
        assert made.weights.loaded.fingerprint == load_model(folder, exact_ops()).fingerprint
    finally:
        made.close()


@pytest.mark.parametrize("what", ["weights that only the first process loads", "no folder", "a file that is damaged"])
def test_a_replica_with_another_model_on_a_host_does_not_start(what: str, tmp_path: Path) -> None:
    folder, there = checkpoint(tmp_path / "one"), tmp_path / "two"
    host = socket.gethostname()
    if what == "no folder":
        said = rf"there is no such folder \(stage 1, {there} on {host}\)"
    else:
        copied(folder, there, tensors=of_other_values(folder, NORM))
        said = f"^{there} on {host} · {NORM}: is of the SHA-256"
        if what == "a file that is damaged":
            digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
            (there / "SHA256SUMS").write_text(f"{digest}  model.safetensors\n")
            said = rf"model\.safetensors: its SHA-256 is .*{digest}: download it again \(stage 1, {there} on {host}\)"
    with pytest.raises(CheckpointError, match=said):
        built(folder, [Host(str(there))], **STAGES)
    assert followers() == []
