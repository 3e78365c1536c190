"""A model that no memory of this machine, or none of its GPUs, could hold is refused before anything is started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hollow_checkpoints import INT4, LLAMA_7B, write_hollow

from motley.replicas.capacity.device_fit import find_table_devices
from motley.replicas.demo import demo_path
from motley.replicas.engine.startup import memory_check
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import InvalidRequest
from motley.replicas.host.host_memory import total_memory

LARGE = {
    **LLAMA_7B, "hidden_size": 65_536, "intermediate_size": 172_032, "num_hidden_layers": 40,
    "num_attention_heads": 512, "num_key_value_heads": 512,
}  # fmt: skip


def test_what_is_larger_than_the_machine_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """Terabytes, in files that take no disk."""
    folder = write_hollow(tmp_path, {**LARGE, "quantization_config": INT4})
    with pytest.raises(InvalidRequest) as caught:
        memory_check.check_memory(folder, EngineConfig())
    assert caught.value.param == "model"
    for words in ("GiB on a CPU, and this machine has", "motley fit", "--weights-memory"):
        assert words in caught.value.message


def test_a_model_that_fits_is_not_looked_at_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("it takes seconds"))
    memory_check.check_memory(demo_path(), EngineConfig())


def test_what_it_is_kept_in_counts_and_not_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_hollow(tmp_path, LLAMA_7B)
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    monkeypatch.setattr(memory_check, "total_memory", lambda: int(0.4 * files))
    assert "GiB on a CPU" in memory_check.machine_shortage(folder, EngineConfig())
    monkeypatch.setattr(memory_check, "total_memory", lambda: 2 * files)
    assert memory_check.machine_shortage(folder, EngineConfig()) == ""


def test_a_container_has_what_its_group_may_have(tmp_path: Path) -> None:
    whole = total_memory(tmp_path)
    assert whole > 2**28
    (tmp_path / "memory.max").write_text("max\n")
    assert total_memory(tmp_path) == whole
    (tmp_path / "memory.max").write_text(f"{2**28}\n")
    assert total_memory(tmp_path) == 2**28


def gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Pretend that these cards are in the machine."""
    places = [place for name in names for place in find_table_devices(name)]
    monkeypatch.setattr(memory_check, "local_gpus", lambda config: places)


@pytest.mark.parametrize(
    ("cards", "changes", "words"),
    [
        (("Tesla T4",), {}, ("no GPU here can hold it: the weights take 12.", "Tesla T4 has 14.", "one KV block")),
        (("NVIDIA GeForce GTX 1080 Ti", "Tesla T4"), {}, ("Tesla T4 has 14.",)),  # what misses least is told
        (("Tesla T4",), {"tensor_parallel": 2}, ()),
        (("Tesla T4",), {"pipeline_parallel": 2}, ()),
        (("NVIDIA GeForce GTX 1080 Ti", "Tesla V100-SXM2-32GB"), {}, ()),  # one of them can
        (("NVIDIA GeForce GTX 1080 Ti",), {"tensor_parallel": 2}, ("its share of one of 2 GPUs",)),  # fp32 there
        (("NVIDIA GeForce GTX 1080 Ti",), {"tensor_parallel": 4}, ()),
        (("Tesla T4",), {"tensor_parallel": 3}, ()),  # it cannot be divided so, which others say
        (("Tesla T4",), {"kv_memory_bytes": 2**20}, ()),  # it is set by hand, and the weights alone fit
        (("NVIDIA GeForce GTX 1080 Ti",), {"kv_memory_bytes": 2**20}, ("no GPU here can hold it",)),
        ((), {}, ()),  # none to be seen: others say so
    ],
)  # fmt: skip
def test_what_no_gpu_here_could_hold_is_told_as_fit_reckons(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cards: tuple[str, ...],
    changes: dict[str, Any],
    words: Sequence[str],
) -> None:
    """14.6 GB of weights in half precision, for a step of many tokens."""
    gpus(monkeypatch, *cards)
    folder = write_hollow(tmp_path, LLAMA_7B)
    message = memory_check.gpu_shortage(folder, EngineConfig(device="cuda", max_batch_tokens=8192, **changes))
    assert bool(message) == bool(words)
    for each in (*words, *(("motley fit", "--tensor-parallel") if words else ())):
        assert each in message


def test_a_share_of_one_gpu_is_told_of_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, "Tesla T4")
    config = EngineConfig(device="cuda", tensor_parallel=2)
    message = memory_check.gpu_shortage(write_hollow(tmp_path, {**LARGE, "quantization_config": INT4}), config)
    assert "its share of one of 2 GPUs" in message
    assert "--weights-memory" not in message  # parts of a model stay in memory


def test_gpus_are_asked_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has the settings of the engine, and is started only for a model that is not small."""
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, memory_check.EXIT_TOO_LARGE, "model: no GPU here can hold it\n")

    monkeypatch.setattr(subprocess, "run", run)
    config = EngineConfig(device="cuda,cuda", pipeline_parallel=2, pipeline_layers=(10, 22), max_running=3)
    memory_check.check_memory(demo_path(), config)
    assert not asked
    folder = write_hollow(tmp_path, LLAMA_7B)
    with pytest.raises(InvalidRequest, match="no GPU here can hold it"):
        memory_check.check_memory(folder, config)
    seen: list[EngineConfig] = []
    monkeypatch.setattr(sys, "argv", ["memory_check", *asked[0][3:]])
    monkeypatch.setattr(memory_check, "gpu_shortage", lambda folder, config: seen.append(config) or "")
    assert memory_check.main() == 0
    assert seen == [config]
