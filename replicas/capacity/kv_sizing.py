"""Sizes of an engine's KV cache and longest sequence: from the settings, the model and the free memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...kernels.ops import Ops
from ..engine_config import EngineConfig
from ..errors import InvalidRequest
from ..host.host_memory import free_memory
from ..kv.blocks import blocks_for
from ..kv.memory_budget import KvBudget, MemoryParts, cpu_kv_budget, kv_budget
from ..loading.model_loader import LoadedModel
from ..model.layers import allocate_kv
from ..types import BLOCK_TOKENS
from .device_fit import FitWorkload, memory_parts

__all__ = ["count_kv_blocks", "largest_step_bytes", "max_model_len"]


def count_kv_blocks(
    config: EngineConfig,
    loaded: LoadedModel,
    ops: Ops,
    *,
    shares: bool = False,
    stays: bool = False,
    kv_layers: int | None = None,
) -> tuple[int, str]:
    """Return the number of KV blocks, and why that many. Raises InvalidRequest if not one fits.

    shares     whether prefixes are shared through a store
    stays      whether KV never goes to the host, whatever is configured
    kv_layers  layers of all processes that share this memory: a configured size is for one process, while free memory
               is divided among all. None: no other process shares it
    """
    own = loaded.decoder.local.layers
    counted = len(own) if config.kv_memory_bytes is not None or kv_layers is None else kv_layers
    block_bytes = sum(tensor.nbytes for tensor in allocate_kv(ops, own, 1)) * counted // len(own)
    longest = config.max_model_len or loaded.config.max_model_len
    useful = config.max_running * blocks_for(longest)
    if config.kv_memory_bytes is not None:
        blocks, source = config.kv_memory_bytes // block_bytes, "as configured"
    else:
        config = replace(config, swap_memory_bytes=0) if stays else config
        budget = _kv_budget(config, loaded, ops, shares and not stays)
        blocks, source = budget.blocks(block_bytes), budget.why
    blocks = min(blocks, useful)
    if blocks < 1:
        raise InvalidRequest(
            f"kv_memory_bytes: there is no room for one KV block, which takes {block_bytes} bytes ({source})",
            param="kv_memory_bytes",
        )
    size = blocks * block_bytes / 2**20
    return (
        blocks,
        f"{blocks} blocks of {BLOCK_TOKENS} tokens, {size:.0f} MiB: {source}, at most what max_running can use",
    )


def _kv_budget(config: EngineConfig, loaded: LoadedModel, ops: Ops, shares: bool) -> KvBudget:
    if ops.device.type == "cpu":
        return cpu_kv_budget(free_memory())
    torch.cuda.empty_cache()  # frees memory that was only needed while loading
    free, total = torch.cuda.mem_get_info(ops.device)
    return kv_budget(free, total, _memory_parts(config, loaded, shares))


def largest_step_bytes(config: EngineConfig, loaded: LoadedModel) -> int:
    """Return the bytes that the largest step takes beside weights and KV."""
    return _memory_parts(config, loaded).activations


def _memory_parts(config: EngineConfig, loaded: LoadedModel, shares: bool = False) -> MemoryParts:
    bounds = config.max_batch_tokens, config.max_running, config.swap_memory_bytes, config.speculate_ngram
    return memory_parts(loaded.decoder, FitWorkload(BLOCK_TOKENS, 1, *bounds, shares=shares))


def max_model_len(config: EngineConfig, loaded: LoadedModel, blocks: int) -> tuple[int, str]:
    """Return the tokens of the longest sequence, and why that many. Raises InvalidRequest if the setting is more than
    the model or the KV cache has.
    """
    made_for = loaded.config.max_model_len
    wanted = config.max_model_len or made_for
    if wanted > made_for:
        message = f"max_model_len: {wanted} exceeds the {made_for} positions that the model was made for"
        raise InvalidRequest(message, param="max_model_len")
    kv_tokens = blocks * BLOCK_TOKENS
    if config.max_model_len and kv_tokens < config.max_model_len:
        message = f"max_model_len: the KV cache holds {kv_tokens} tokens, fewer than {config.max_model_len}"
        raise InvalidRequest(message, param="max_model_len")
    if kv_tokens < wanted:
        return kv_tokens, f"{kv_tokens}: the KV cache holds no more (the model was made for {made_for})"
    return wanted, f"{wanted}: " + ("as configured" if config.max_model_len else "what the model was made for")
