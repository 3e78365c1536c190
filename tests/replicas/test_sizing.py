"""KV of a GPU from what is free on it: as `fit_model` has told, of a device whose free memory is given."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hollow_checkpoints import INT4, LLAMA_7B, write_hollow

from motley.replicas.capacity import kv_sizing
from motley.replicas.capacity.device_fit import FitWorkload, build_meta_decoder, find_table_devices, fit_model
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import InvalidRequest
from motley.replicas.kv.blocks import blocks_for
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.types import BLOCK_TOKENS

GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hollow(tmp_path_factory.mktemp("model"), {**LLAMA_7B, "quantization_config": INT4})


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({}, False),
        ({}, True),
        ({"max_running": 300, "max_batch_tokens": 400}, False),
        ({"speculate_ngram": 4, "swap_memory_bytes": 0}, False),
    ],
)
def test_an_engine_has_the_kv_that_fit_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], shares: bool
) -> None:
    checkpoint = inspect_checkpoint(folder)
    [place] = find_table_devices("NVIDIA L4")
    config = EngineConfig(**settings)
    bounds = config.max_batch_tokens, config.max_running, config.swap_memory_bytes, config.speculate_ngram
    told = fit_model(checkpoint, place, FitWorkload(128, 1, *bounds, shares=shares))
    assert told.parts is not None
    assert told.kv_tokens < config.max_running * LLAMA_7B["max_position_embeddings"], "so memory decides"
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    seen = place.free - told.parts.loaded, place.total  # once the weights are there
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: seen if emptied else (0, place.total))
    ops = place.ops()
    decoder = build_meta_decoder(checkpoint.config, checkpoint.format, checkpoint.tensors, ops)
    loaded: Any = SimpleNamespace(decoder=decoder, config=checkpoint.config)
    blocks, why = kv_sizing.count_kv_blocks(config, loaded, ops, shares=shares)
    assert blocks * BLOCK_TOKENS == told.kv_tokens > 0
    assert f"{told.parts.activations / 2**20:.0f} MiB for activations" in why
    assert kv_sizing.max_model_len(config, loaded, blocks)[0] == min(4096, told.kv_tokens)
    seen = told.parts.activations, place.total
    with pytest.raises(InvalidRequest, match="kv_memory_bytes: there is no room for one KV block"):
        kv_sizing.count_kv_blocks(config, loaded, ops, shares=shares)


def test_what_is_configured_is_taken_and_no_more_than_is_useful(folder: Path) -> None:
    checkpoint = inspect_checkpoint(folder)
    ops = find_table_devices("NVIDIA L4")[0].ops()
    decoder = build_meta_decoder(checkpoint.config, checkpoint.format, checkpoint.tensors, ops)
    loaded: Any = SimpleNamespace(decoder=decoder, config=checkpoint.config)
    config = EngineConfig(kv_memory_bytes=GIB, max_running=8)
    blocks, why = kv_sizing.count_kv_blocks(config, loaded, ops)
    assert blocks == GIB // (2 * 32 * 4096 * 2 * BLOCK_TOKENS)
    assert "as configured" in why
    few = EngineConfig(kv_memory_bytes=GIB, max_running=1, max_model_len=100)
    assert kv_sizing.count_kv_blocks(few, loaded, ops)[0] == blocks_for(100)
    with pytest.raises(InvalidRequest, match="max_model_len: 5000 exceeds the 4096 positions"):
        kv_sizing.max_model_len(EngineConfig(max_model_len=5000), loaded, blocks)
    with pytest.raises(InvalidRequest, match="the KV cache holds 160 tokens, fewer than 4096"):
        kv_sizing.max_model_len(EngineConfig(max_model_len=4096), loaded, 10)
    assert kv_sizing.max_model_len(EngineConfig(), loaded, 10)[0] == 160
