"""Repacked weights from start to start: the same numbers, none that are stale, and no harm from a damaged file."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from decoder_steps import Session, exact_ops
from gptq_files import build_gptq
from safetensors.torch import load_file, save_file
from tiny_checkpoints import build_checkpoint

from motley.kernels.cpu.cpu_ops import CpuOps
from motley.replicas.checkpoint.cache import weights_cache
from motley.replicas.checkpoint.cache.weights_cache import WeightsCache, open_weights_cache
from motley.replicas.checkpoint.reading import weight_digests
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import InvalidRequest
from motley.replicas.loading.model_loader import LoadedModel, load_model
from motley.replicas.model.parts.layer_source import LayerSource
from motley_bench.checkpoints.random_checkpoint import SHAPES, write_dense

PROMPT = list(range(3, 40))
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _times_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of these tests were written this very moment."""
    monkeypatch.setattr(weights_cache, "RACY_S", 0.0)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path / "model", "qwen2")


def _cache(tmp_path: Path) -> WeightsCache:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    return WeightsCache(folder, min_bytes=0)


def _start(checkpoint: Path, tmp_path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    cache = _cache(tmp_path)
    loaded = load_model(checkpoint, exact_ops(dtype), cache=cache)
    cache.wait()
    return loaded


def _entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "weights").iterdir())


def _logits(loaded: LoadedModel) -> torch.Tensor:
    return Session(loaded.decoder).feed(PROMPT)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of layers that are made from the checkpoint."""
    found: list[str] = []
    whole = CpuOps.linear

    def linear(ops: CpuOps, weight: object, role: object = "layer") -> object:
        found.append(str(role))
        return whole(ops, weight, role)  # type: ignore[arg-type]

    monkeypatch.setattr(CpuOps, "linear", linear)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "tied", "gptq", "desc_act"])
def test_the_second_start_repacks_nothing_and_computes_the_same_bits(
    kind: str, dtype: torch.dtype, tmp_path: Path, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind in ("gptq", "desc_act"):
        folder = build_gptq(tmp_path / "model", bits=4, group_size=32, desc_act=kind == "desc_act")
    else:
        folder = build_checkpoint(
            tmp_path / "model", "qwen2" if kind == "tied" else kind, tie_word_embeddings=kind == "tied"
        )
    plain = load_model(folder, exact_ops(dtype))
    first = _start(folder, tmp_path, dtype)
    taken.clear()

    def read(*_: object, **__: object) -> bytes:
        raise AssertionError("the checkpoint is read again")

    monkeypatch.setattr("motley.replicas.loading.model_loader.digest_pieces", read)
    second = _start(folder, tmp_path, dtype)
    assert not taken
    assert plain.fingerprint == first.fingerprint == second.fingerprint
    assert plain.weight_bytes == second.weight_bytes
    assert plain.decoder.held == second.decoder.held
    assert plain.decoder.ops.choices == second.decoder.ops.choices
    assert torch.equal(_logits(plain), _logits(second))
    assert len(_entries(tmp_path)) == 1


def test_the_second_start_digests_what_it_has_mapped_and_reads_nothing_else(
    checkpoint: Path, tmp_path: Path, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _start(checkpoint, tmp_path)
    taken.clear()

    def read(*_: object) -> None:
        raise AssertionError("it is read beside its pages")

    monkeypatch.setattr(weight_digests, "read_piece", read)
    assert torch.equal(_logits(_start(checkpoint, tmp_path)), _logits(first))
    assert not taken


def test_other_settings_have_an_entry_of_their_own(checkpoint: Path, tmp_path: Path) -> None:
    for dtype in (*DTYPES, *DTYPES):
        _start(checkpoint, tmp_path, dtype)
    assert len(_entries(tmp_path)) == 2


def _changed(checkpoint: Path, *, in_place: bool) -> None:
    """One number of a layer, the size and the time of the last write as before."""
    path = checkpoint / "model.safetensors"
    before = path.stat()
    tensors = load_file(path)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] += 1.0
    other = path.with_suffix(".other")
    save_file(tensors, other, metadata={"format": "pt"})
    assert other.stat().st_size == before.st_size
    if in_place:
        data = other.read_bytes()
        with path.open("r+b") as file:
            file.write(data)
        other.unlink()
    else:
        other.replace(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_checkpoint_that_changed_is_loaded_anew(checkpoint: Path, tmp_path: Path, in_place: bool) -> None:
    old = _start(checkpoint, tmp_path)
    _changed(checkpoint, in_place=in_place)
    new = _start(checkpoint, tmp_path)
    assert new.fingerprint != old.fingerprint
    assert torch.equal(_logits(new), _logits(load_model(checkpoint, exact_ops())))
    assert not torch.equal(_logits(new), _logits(old))


def test_another_config_is_another_model(checkpoint: Path, tmp_path: Path) -> None:
    old = _start(checkpoint, tmp_path)
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.1'))
    new = _start(checkpoint, tmp_path)
    assert new.fingerprint != old.fingerprint
    assert not torch.equal(_logits(new), _logits(old))


def test_a_copy_of_a_checkpoint_is_read_once_and_finds_the_entry(
    checkpoint: Path, tmp_path: Path, taken: list[str]
) -> None:
    old = _start(checkpoint, tmp_path)
    taken.clear()
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in checkpoint.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert _start(copy, tmp_path).fingerprint == old.fingerprint
    assert not taken


def test_a_file_that_was_written_just_now_is_read_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_cache, "RACY_S", 3600.0)
    _start(checkpoint, tmp_path)
    read = []
    whole = weight_digests.digest_pieces
    monkeypatch.setattr(
        "motley.replicas.loading.model_loader.digest_pieces",
        lambda *given, **named: read.append(1) or whole(*given, **named),
    )
    _start(checkpoint, tmp_path)
    assert read


def _truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def _flipped_at(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


DAMAGE = {
    "truncated": _truncated,
    "empty": lambda path: os.truncate(path, 0),
    "a bit of the header": lambda path: _flipped_at(path, path.read_bytes().index(b'\\"outputs') + 16),
    "a bit of a choice": lambda path: _flipped_at(path, path.read_bytes().index(b"summed") + 1),
    "a bit of a tensor": lambda path: _flipped_at(path, path.stat().st_size // 2),
    "the last bit": lambda path: _flipped_at(path, path.stat().st_size - 1),
    "others may write": lambda path: path.chmod(0o666),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_told_of_and_made_anew(
    damage: str, checkpoint: Path, tmp_path: Path, taken: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    right = _logits(_start(checkpoint, tmp_path))
    [entry] = _entries(tmp_path)
    sound = entry.read_bytes()
    DAMAGE[damage](entry)
    taken.clear()
    assert torch.equal(_logits(_start(checkpoint, tmp_path)), right)
    assert taken
    assert "is deleted, and its weights are made anew" in caplog.text
    [entry] = _entries(tmp_path)
    assert len(entry.read_bytes()) == len(sound)
    taken.clear()
    assert torch.equal(_logits(_start(checkpoint, tmp_path)), right)
    assert not taken


def test_another_s_entry_under_this_name_is_not_used(checkpoint: Path, tmp_path: Path, taken: list[str]) -> None:
    _start(checkpoint, tmp_path, torch.bfloat16)
    [other] = _entries(tmp_path)
    _start(checkpoint, tmp_path)
    [own] = set(_entries(tmp_path)) - {other}
    own.write_bytes(other.read_bytes())
    taken.clear()
    _start(checkpoint, tmp_path)
    assert taken


def test_what_is_known_of_a_checkpoint_may_be_damaged(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = _start(checkpoint, tmp_path)
    [known] = (tmp_path / "cache" / "known").iterdir()
    for text in ("", "[]", "{}", known.read_text().replace('"contents": "', '"contents": "00')):
        known.write_text(text)
        assert _start(checkpoint, tmp_path).fingerprint == old.fingerprint
    assert "the recorded digests of a checkpoint cannot be read" in caplog.text


def test_two_processes_at_once(checkpoint: Path, tmp_path: Path, taken: list[str]) -> None:
    code = (
        "import sys, torch; from pathlib import Path; from motley.kernels.ops import ops_for_device;"
        "from motley.replicas.loading.model_loader import load_model;"
        "from motley.replicas.checkpoint.cache.weights_cache import WeightsCache;"
        "cache = WeightsCache(Path(sys.argv[2]), min_bytes=0);"
        "print('ready', flush=True); sys.stdin.readline();"
        "print(load_model(sys.argv[1], ops_for_device('cpu', torch.float32, 'exact'), cache=cache).fingerprint)"
    )
    folder = _cache(tmp_path).folder
    command = [sys.executable, "-c", code, str(checkpoint), str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    for one in both:
        assert one.stdout.readline() == "ready\n"
    said = [one.communicate("\n", timeout=120)[0] for one in both]
    assert said[0] == said[1]
    assert [path.suffix for path in _entries(tmp_path)] == [".safetensors"]


def test_a_folder_that_cannot_be_written_is_a_word_in_the_log(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / "known").write_text("a file where a folder should be")
    (tmp_path / "cache" / "weights").write_text("likewise")
    loaded = _start(checkpoint, tmp_path)
    assert torch.equal(_logits(loaded), _logits(load_model(checkpoint, exact_ops())))
    assert "are not kept" in caplog.text


def test_a_full_disk_is_a_word_in_the_log_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: object, *_: object) -> None:
        file.write(b"half of it")  # type: ignore[attr-defined]
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weights_cache, "write_packed_weights", full)
    _start(checkpoint, tmp_path)
    assert "No space left on device" in caplog.text
    assert _entries(tmp_path) == []


def test_what_was_not_used_for_longest_goes_first(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _start(checkpoint, tmp_path, torch.float32)
    [old] = _entries(tmp_path)
    os.utime(old, (1, 1))
    monkeypatch.setattr(weights_cache, "MAX_CACHE_BYTES", old.stat().st_size + 10)
    _start(checkpoint, tmp_path, torch.bfloat16)
    [new] = _entries(tmp_path)
    assert new != old


def test_a_disk_that_would_be_full_keeps_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights_cache, "FREE_SHARE", 1.0)
    _start(checkpoint, tmp_path)
    assert _entries(tmp_path) == []
    assert "no space for" in caplog.text


@pytest.mark.parametrize(("what", "value"), [("MAX_CACHE_BYTES", 1), ("FREE_SHARE", 1.0)])
def test_what_can_have_no_room_takes_nothing_away(
    what: str, value: float, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _start(checkpoint, tmp_path)
    before = _entries(tmp_path)
    monkeypatch.setattr(weights_cache, what, value)
    cache = open_weights_cache(str(before[0].parent.parent))
    assert cache is not None
    assert not cache.fill("another\nkey", 2**20, lambda file: None)
    assert _entries(tmp_path) == before != []


def test_a_folder_of_others_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert open_weights_cache(str(tmp_path / "open")) is None
    assert "others may write to it" in caplog.text
    assert open_weights_cache("off") is None


def test_the_default_folder_is_the_user_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = open_weights_cache(None)
    assert cache is not None
    assert cache.folder == tmp_path / "motley" / "weights"
    assert cache.folder.stat().st_mode & 0o777 == 0o700


def test_where_the_umask_lets_a_group_write_entries_are_the_user_s_alone(
    checkpoint: Path, tmp_path: Path, taken: list[str]
) -> None:
    before = os.umask(0o002)
    try:
        _start(checkpoint, tmp_path)
        taken.clear()
        _start(checkpoint, tmp_path)
    finally:
        os.umask(before)
    assert not taken
    assert [path.stat().st_mode & 0o777 for path in _entries(tmp_path)] == [0o600]


def test_a_small_model_is_not_kept(checkpoint: Path, tmp_path: Path) -> None:
    cache = WeightsCache(_cache(tmp_path).folder)
    load_model(checkpoint, exact_ops(), cache=cache)
    cache.wait()
    assert list(cache.folder.iterdir()) == []


def test_the_setting_is_a_folder_or_off() -> None:
    assert EngineConfig(weights_cache="off").weights_cache == "off"
    with pytest.raises(InvalidRequest, match="weights_cache"):
        EngineConfig(weights_cache="")
    assert LayerSource.__dataclass_fields__["repack_cache"].default is not None


_STARTS = """
import ctypes, gc, re, sys
from pathlib import Path
import torch
from motley.replicas.loading.operator_choice import choose_operators
from motley.replicas.engine_config import EngineConfig
from motley.replicas.loading.model_loader import load_model
from motley.replicas.checkpoint.cache.weights_cache import WeightsCache

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

small, large, folder = sys.argv[1:]
torch.set_num_threads(2)
first = load_model(small, choose_operators(EngineConfig(dtype="bfloat16"), torch.bfloat16)[0])
before, anonymous = status("VmRSS"), status("RssAnon")
cache = WeightsCache(Path(folder), min_bytes=0)
model = load_model(large, choose_operators(EngineConfig(dtype="bfloat16"), torch.bfloat16)[0], cache=cache)
cache.wait()
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
print(status("VmHWM") - before, status("RssAnon") - anonymous, model.weight_bytes)
"""


_ENDS = """
import sys
from pathlib import Path
import torch
from motley.kernels.ops import ops_for_device
from motley.replicas.checkpoint.cache import weights_cache
from motley.replicas.loading.model_loader import load_model

weights_cache.READY_S = 3600.0
cache = weights_cache.WeightsCache(Path(sys.argv[2]), min_bytes=0)
load_model(sys.argv[1], ops_for_device(torch.device("cpu"), torch.float32), cache=cache)
assert not list(Path(sys.argv[2]).glob("weights/*.safetensors"))
"""


def test_what_is_kept_is_written_when_the_engine_is_ready_or_ends(checkpoint: Path, tmp_path: Path) -> None:
    """Until then there is better to do; who ends at once leaves it all the same."""
    command = [sys.executable, "-c", _ENDS, str(checkpoint), str(_cache(tmp_path).folder)]
    subprocess.run(command, check=True, timeout=120)
    assert [path.suffix for path in _entries(tmp_path)].count(".safetensors") == 1


def test_neither_start_has_weights_in_memory_twice(tmp_path: Path) -> None:
    shape = replace(SHAPES["tiny"], hidden_size=1024, intermediate_size=4096, num_hidden_layers=12)
    write_dense(SHAPES["tiny"], tmp_path / "small")
    write_dense(shape, tmp_path / "large")
    size = (tmp_path / "large" / "model.safetensors").stat().st_size
    folder = _cache(tmp_path).folder
    command = [sys.executable, "-c", _STARTS, str(tmp_path / "small"), str(tmp_path / "large"), str(folder)]
    found = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(2)]
    (first_peak, first, told), (second_peak, second, _) = ([int(each) for each in start] for start in found)
    assert told > 300e6
    # Beside what stays: the checkpoint, mapped, and what two of twelve layers are repacked in.
    assert first_peak < told + size + 0.75 * told
    assert first == pytest.approx(told, rel=0.15)
    # Mapped: shared with others, and given back when memory is short.
    assert second < 0.05 * told
    assert second_peak < 1.2 * told
