"""Memory that is left for KV, in numbers alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.kernels.layer_memory import LayerMemory
from motley.replicas.checkpoint.files.json_fields import JsonFields
from motley.replicas.host.host_memory import available_memory, free_memory, memory_owner
from motley.replicas.kv.memory_budget import (
    MemoryParts,
    cpu_kv_budget,
    history_bytes,
    history_dtype,
    kv_budget,
    reserve_bytes,
)
from motley.replicas.model.families.registry import read_config

MIB = 2**20
PARTS = MemoryParts(
    weights=4000 * MIB, metadata=100 * MIB, kv_block=MIB, activations=300 * MIB, graphs=50 * MIB, staging=8 * MIB
)


def test_what_is_free_less_activations_graphs_and_the_reserve() -> None:
    budget = kv_budget(10_000 * MIB, 16_000 * MIB, PARTS)
    assert reserve_bytes(16_000 * MIB) == 480 * MIB
    assert (budget.nbytes, budget.missing) == ((10_000 - 300 - 50 - 8 - 480) * MIB, 0)
    assert budget.blocks(PARTS.kv_block) == 9162
    assert budget.why == (
        "10000 MiB free after the weights, less 300 MiB for activations, 50 MiB for graphs, "
        "8 MiB for copies to the host and 480 MiB in reserve"
    )


def test_a_small_device_keeps_256_mib_in_reserve_and_a_caller_may_say_how_much() -> None:
    assert kv_budget(1000 * MIB, 4000 * MIB, PARTS).nbytes == (1000 - 300 - 50 - 8 - 256) * MIB
    assert kv_budget(1000 * MIB, 4000 * MIB, PARTS, reserve=0).nbytes == 642 * MIB


def test_histories_are_as_wide_as_the_longest_output_needs() -> None:
    fields = {"model_type": "qwen2", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 1,
              "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 64}  # fmt: skip
    for longest, dtype in ((2**15, torch.int16), (2**15 + 1, torch.int32)):
        config = read_config(JsonFields({**fields, "max_position_embeddings": longest}, "config.json"))
        assert history_dtype(longest) == dtype
        assert torch.iinfo(dtype).max >= longest - 1, "a prompt has a token"
        assert history_bytes(config, 8) == 17 * 1000 * dtype.itemsize


def test_what_is_missing_is_told() -> None:
    assert kv_budget(100 * MIB, 4000 * MIB, PARTS, reserve=0).missing == 258 * MIB
    assert kv_budget(-100 * MIB, 4000 * MIB, PARTS, reserve=0).missing == 458 * MIB
    assert (cpu_kv_budget(-5).nbytes, cpu_kv_budget(-5).missing) == (0, 5)
    assert cpu_kv_budget(400).nbytes == 100


@settings(derandomize=True, max_examples=200)
@given(free=st.integers(-(2**40), 2**40), total=st.integers(1, 2**40), reserve=st.none() | st.integers(0, 2**34))
def test_no_part_is_given_away_twice(free: int, total: int, reserve: int | None) -> None:
    budget = kv_budget(free, total, PARTS, reserve)
    kept_back = reserve_bytes(total) if reserve is None else reserve
    assert budget.nbytes - budget.missing == free - PARTS.activations - PARTS.graphs - PARTS.staging - kept_back
    assert 0 in (budget.nbytes, budget.missing)
    assert budget.blocks(PARTS.kv_block) * PARTS.kv_block <= budget.nbytes


def test_what_is_held_adds_up() -> None:
    both = LayerMemory(10, 2, given=10) + LayerMemory(5, 1)
    assert (both.weights, both.metadata, both.given, both.nbytes) == (15, 3, 10, 18)


def test_a_container_has_what_its_control_group_has_left(tmp_path: Path) -> None:
    whole = free_memory(tmp_path)
    assert whole > 0
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(f"{64 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {16 << 20}\n")
    assert free_memory(tmp_path) == pytest.approx(whole, rel=0.2)
    (tmp_path / "memory.max").write_text(f"{128 << 20}\n")
    assert free_memory(tmp_path) == (128 - 64 + 16) << 20
    (tmp_path / "memory.max").write_text(f"{32 << 20}\n")
    assert free_memory(tmp_path) == 0
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       64 kB\nMemAvailable:   32 kB\n")
    assert available_memory(tmp_path, meminfo) == 0, "the group's bound is one here too"
    assert available_memory(tmp_path / "none", meminfo) == 32 << 10


def test_a_memory_is_the_machine_s_unless_its_control_group_has_a_bound(tmp_path: Path) -> None:
    boot, one, other = tmp_path / "boot_id", tmp_path / "one", tmp_path / "other"
    boot.write_text("5f2a\n")
    for group in (one, other):
        group.mkdir()
        (group / "memory.max").write_text("max\n")
    assert memory_owner(one, boot) == memory_owner(other, boot) == memory_owner(tmp_path, boot) == "5f2a"
    (one / "memory.max").write_text("1024\n")
    assert memory_owner(one, boot) not in ("5f2a", memory_owner(other, boot))
    assert memory_owner(one, boot).startswith("5f2a/")
