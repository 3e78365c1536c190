"""A model whose weights no memory of this machine could hold is refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from hollow_checkpoints import INT4, LLAMA_7B, write_hollow

from motley.replicas import memory_check
from motley.replicas.demo import demo_path
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import InvalidRequest
from motley.replicas.host_memory import total_memory

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
    monkeypatch.setattr(memory_check.subprocess, "run", lambda *args, **kwargs: pytest.fail("it takes seconds"))
    memory_check.check_memory(demo_path(), EngineConfig())


def test_what_it_is_kept_in_counts_and_not_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_hollow(tmp_path, LLAMA_7B)
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    monkeypatch.setattr(memory_check, "total_memory", lambda: int(0.4 * files))
    assert "GiB on a CPU" in memory_check.too_large(folder, EngineConfig())
    monkeypatch.setattr(memory_check, "total_memory", lambda: 2 * files)
    assert memory_check.too_large(folder, EngineConfig()) == ""


def test_a_container_has_what_its_group_may_have(tmp_path: Path) -> None:
    whole = total_memory(tmp_path)
    assert whole > 2**28
    (tmp_path / "memory.max").write_text("max\n")
    assert total_memory(tmp_path) == whole
    (tmp_path / "memory.max").write_text(f"{2**28}\n")
    assert total_memory(tmp_path) == 2**28
