"""From a model's name to an engine that is ready: choose, load, size the KV cache, warm up."""

from __future__ import annotations

import hashlib
import logging
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..kernels.contract import DeviceOps
from ..kernels.ops import Ops, choose_dtype, for_device
from .blocks import BlockPool, blocks_for
from .checkpoint import inspect_checkpoint, resolve_model
from .cores import usable_cores
from .engine import EngineCore
from .engine_config import EngineConfig
from .errors import InvalidRequest
from .families.registry import architecture_of
from .fit import Asked, parts_of
from .gpu.accelerator import Accelerator, Cuda
from .gpu.runner import GpuRunner
from .grammars import Grammars
from .limits import Limits
from .memory import KvBudget, cpu_kv_budget, free_memory, kv_budget
from .model import LoadedModel, load_model
from .protocol import BLOCK_TOKENS, ModelInfo, ReplicaProfile, Request
from .runner import ModelRunner
from .sampling_params import SamplingParams
from .scheduler import Scheduler
from .tokenizer import Tokenizer

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # done bytes, total bytes

_WARM_UP_PROMPT = 256
_WARM_UP_STEPS = 8


@dataclass(slots=True)
class BuiltEngine:
    """An engine and what is known of it.

    choices   what was decided automatically -> why
    defaults  sampling that the checkpoint's authors want, as arguments of SamplingParams
    """

    core: EngineCore
    runner: ModelRunner | GpuRunner
    tokenizer: Tokenizer | None
    profile: ReplicaProfile
    choices: Mapping[str, str]
    defaults: Mapping[str, Any]

    def warm_up(self) -> None:
        """Run every path once, so that readiness means speed, and measure the rates of the profile."""
        prefill_s, decode_s = _measure(self.core)
        length = _warm_up_length(self.core)
        self.profile = replace(self.profile, prefill_tokens_per_s=length / prefill_s, decode_step_s=decode_s)
        self.core.scheduler.pool.forget_prefixes()


def build_engine(
    model: str | Path,
    config: EngineConfig,
    *,
    name: str | None = None,
    progress: Progress | None = None,
    ops: Ops | None = None,
    accelerator: Accelerator | None = None,
) -> BuiltEngine:
    """Load `model` (a folder or a Hugging Face id) under `config`. Raises CheckpointError, InvalidRequest.

    ops          to compute with; None: those of the config's device
    accelerator  what their device is given work by; None: that of a GPU, or nothing on a CPU
    """
    path = resolve_model(model)
    torch.set_num_threads(config.threads or usable_cores())
    checkpoint = inspect_checkpoint(path)
    tokenizer = Tokenizer.load(path) if Tokenizer.is_in(path) else None
    ops, why = operators(config, checkpoint.config.dtype) if ops is None else (ops, "that of the operators given")
    if config.speculate_ngram and (accelerator is not None or ops.device.type != "cpu"):
        raise InvalidRequest("speculate_ngram: drafts are verified on a CPU only; expected 0", param="speculate_ngram")
    loaded = load_model(path, ops, progress=progress)
    torch.set_num_threads(ops.torch_threads)
    num_blocks, kv_why = _num_blocks(config, loaded, ops)
    max_model_len, len_why = _max_model_len(config, loaded, num_blocks)
    if accelerator is None and ops.device.type == "cuda":
        accelerator = Cuda(ops.device)
    choices = {"dtype": why, "kv_blocks": kv_why, "max_model_len": len_why, **ops.choices}
    if tokenizer is None:
        choices["tokenizer"] = "none in the folder: token ids only, no text and no chat"
        log.warning("tokenizer: %s", choices["tokenizer"])
    for what, reason in choices.items():
        log.info("%s: %s", what, reason)
    limits = Limits(loaded.config.vocab_size, max_model_len, loaded.defaults.eos_token_ids)
    pool = BlockPool(num_blocks, reuse_prefixes=config.reuse_prefixes)
    scheduler = Scheduler(
        pool,
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        max_drafts=config.speculate_ngram,
    )
    runner = _runner(loaded, ops, accelerator, config, num_blocks, max_model_len)
    grammars = Grammars(tokenizer, limits.vocab_size, limits.eos_token_ids) if tokenizer else None
    core = EngineCore(runner, scheduler, limits, tokenizer, grammars=grammars)
    info = ModelInfo(
        name=name or (path.name if Path(model).is_dir() else str(model)),
        family=loaded.config.family,
        vocab_size=limits.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=limits.eos_token_ids,
        dtype=str(ops.dtype).removeprefix("torch."),
        quantization=loaded.quantization,
        architecture=architecture_of(loaded.config.family),
    )
    profile = _profile(info, config, loaded, ops, num_blocks, choices)
    return BuiltEngine(core, runner, tokenizer, profile, choices, loaded.defaults.sampling())


def _runner(
    loaded: LoadedModel,
    ops: Ops,
    accelerator: Accelerator | None,
    config: EngineConfig,
    num_blocks: int,
    max_model_len: int,
) -> ModelRunner | GpuRunner:
    if accelerator is None:
        return ModelRunner(loaded.decoder, ops.allocate_kv(*_kv_geometry(loaded, num_blocks)), ops.device)
    assert isinstance(ops, DeviceOps), "an accelerator's operators choose tokens"
    loaded.decoder.rotary.reserve(max_model_len)  # graphs hold its address
    return GpuRunner(
        loaded.decoder,
        ops.allocate_kv(*_kv_geometry(loaded, num_blocks + 1)),  # the last is for the padding of graphs
        ops.sample,
        accelerator,
        max_running=config.max_running,
        max_model_len=max_model_len,
        longest_blocks=blocks_for(max_model_len),
        padding_block=num_blocks,
        graphs=config.graphs,
    )


def operators(config: EngineConfig, stored: torch.dtype) -> tuple[Ops, str]:
    """The operators, and why they compute in their dtype. Raises InvalidRequest for what the device cannot do."""
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise InvalidRequest(f"device: {config.device!r} is none; expected cpu or cuda[:i]", param="device") from error
    try:
        dtype, why = _dtype(config.dtype, device, stored)
        ops = for_device(
            device, dtype, numerics=config.numerics, cpu_weights=config.cpu_weights, kv_dtype=config.kv_dtype
        )
        return ops, why
    except ValueError as error:
        raise InvalidRequest(str(error), param=str(error).partition(":")[0]) from error


def _dtype(asked: str, device: torch.device, stored: torch.dtype) -> tuple[torch.dtype, str]:
    if asked == "auto":
        return choose_dtype(device, stored)
    return getattr(torch, asked), f"{asked}: as configured"


def _kv_geometry(loaded: LoadedModel, num_blocks: int) -> tuple[int, int, int, int]:
    config = loaded.config
    return config.num_layers, num_blocks, config.num_kv_heads, config.head_dim


def _num_blocks(config: EngineConfig, loaded: LoadedModel, ops: Ops) -> tuple[int, str]:
    block_bytes = sum(tensor.nbytes for tensor in ops.allocate_kv(*_kv_geometry(loaded, 1)))
    longest = config.max_model_len or loaded.config.max_model_len
    useful = config.max_running * blocks_for(longest)
    if config.kv_memory_bytes is not None:
        blocks, source = config.kv_memory_bytes // block_bytes, "as configured"
    else:
        budget = _kv_budget(config, loaded, ops)
        blocks, source = budget.blocks(block_bytes), budget.why
    blocks = min(blocks, useful)
    if blocks < 1:
        raise InvalidRequest(f"kv_memory_bytes: one block needs {block_bytes} bytes", param="kv_memory_bytes")
    size = blocks * block_bytes / 2**20
    return (
        blocks,
        f"{blocks} blocks of {BLOCK_TOKENS} tokens, {size:.0f} MiB: {source}, at most what max_running can use",
    )


def _kv_budget(config: EngineConfig, loaded: LoadedModel, ops: Ops) -> KvBudget:
    if ops.device.type == "cpu":
        return cpu_kv_budget(free_memory())
    asked = Asked(BLOCK_TOKENS, 1, config.max_batch_tokens, config.max_running)
    torch.cuda.empty_cache()  # what loading took and gave back
    free, total = torch.cuda.mem_get_info(ops.device)
    return kv_budget(free, total, parts_of(loaded.decoder, asked))


def _max_model_len(config: EngineConfig, loaded: LoadedModel, num_blocks: int) -> tuple[int, str]:
    made_for = loaded.config.max_model_len
    wanted = config.max_model_len or made_for
    if wanted > made_for:
        message = f"max_model_len: {wanted} exceeds the {made_for} positions that the model was made for"
        raise InvalidRequest(message, param="max_model_len")
    room = num_blocks * BLOCK_TOKENS
    if config.max_model_len and room < config.max_model_len:
        message = f"max_model_len: the KV cache holds {room} tokens, fewer than {config.max_model_len}"
        raise InvalidRequest(message, param="max_model_len")
    if room < wanted:
        return room, f"{room}: the KV cache holds no more (the model was made for {made_for})"
    return wanted, f"{wanted}: " + ("as configured" if config.max_model_len else "what the model was made for")


def _profile(
    info: ModelInfo,
    config: EngineConfig,
    loaded: LoadedModel,
    ops: Ops,
    num_blocks: int,
    choices: Mapping[str, str],
) -> ReplicaProfile:
    numerics = ops.arithmetic
    fingerprint = hashlib.sha256(f"{loaded.fingerprint}|{numerics}|kv={info.dtype}".encode()).hexdigest()
    return ReplicaProfile(
        replica_id="",
        model=info,
        device=config.device,
        device_name=_device_name(config.device),
        compute_capability=_compute_capability(config.device),
        numerics=numerics,
        fingerprint=fingerprint,
        prefill_tokens_per_s=0.0,
        decode_step_s=0.0,
        kv_blocks_total=num_blocks,
        max_batch_tokens=config.max_batch_tokens,
        choices=dict(choices),
    )


def _device_name(device: str) -> str:
    return (
        torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or platform.machine()
    )


def _compute_capability(device: str) -> str | None:
    return ".".join(map(str, torch.cuda.get_device_capability(device))) if device.startswith("cuda") else None


def _warm_up_length(core: EngineCore) -> int:
    return max(
        1,
        min(_WARM_UP_PROMPT, core.limits.max_model_len - _WARM_UP_STEPS - 1, core.scheduler.max_batch_tokens),
    )


def _measure(core: EngineCore) -> tuple[float, float]:
    """Seconds of one prefill step and of one decode step (median), of two equal runs the second."""
    length = _warm_up_length(core)
    params = SamplingParams(temperature=0.0, max_tokens=_WARM_UP_STEPS, ignore_eos=True, seed=0)
    steps: list[float] = []
    for run in range(2):
        # Different prompts: the second must not find the first one's prefix.
        prompt = tuple((token * 7 + run) % core.limits.vocab_size for token in range(length))
        core.add(-1, Request(request_id="warm-up", prompt_ids=prompt, sampling=params))
        steps, landed, began = [], core.num_steps, time.perf_counter()
        while core.busy:
            core.step()
            if core.num_steps > landed:  # a step may be launched by one call and land in the next
                landed, now = core.num_steps, time.perf_counter()
                steps.append(now - began)
                began = now
    return steps[0], statistics.median(steps[1:]) if len(steps) > 1 else steps[0]
