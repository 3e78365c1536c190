"""Profile of a model from its folder: load it, run it, and compare it with what the device can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...kernels.ops import Ops
from ..engine.startup.engine_builder import BuiltEngine, build_engine
from ..engine.startup.engine_builder import Progress as LoadProgress
from ..engine_config import MAX_COUNT, EngineConfig
from ..errors import InvalidRequest
from ..gpu.accelerator import Accelerator
from ..host.cpu_cores import usable_cores
from ..model.checkpoint_inspection import Checkpoint, inspect_checkpoint
from ..model.decoder import Decoder
from .call_work import CallWork
from .ceiling import Ceiling, LeastTime, cpu_ceiling, gpu_ceiling
from .findings import Finding, find_slow_modules
from .module_facts import ModuleFacts, module_facts
from .module_tree import ModuleNode, build_tree
from .profile_driver import PhaseSamples, ProfileDriver, ProfileOptions
from .step_clock import open_clock
from .stored_weights import stored_weights

__all__ = ["LoadedEngine", "Profile", "ProfileOptions", "ProfilePhase", "load_engine", "profile_engine"]

Progress = Callable[[str], None]  # called with a description of the present work


@dataclass(frozen=True, slots=True)
class ProfilePhase:
    """Profile of one phase, "prefill" or "decode" by `name`.

    step     the tree, with every layer
    plain_s  seconds of the same work without instruments
    tokens   tokens that a step computes (a decode batch), or all steps of a prompt
    """

    name: str
    workload: Mapping[str, int]
    tokens: int
    step: ModuleNode
    plain_s: Sequence[float]
    findings: Sequence[Finding]


@dataclass(frozen=True, slots=True)
class Profile:
    """Profile of a model. about: the model and how it was run, in words."""

    about: Mapping[str, str]
    choices: Mapping[str, str]
    ceiling: Ceiling
    phases: Sequence[ProfilePhase]


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An idle engine, and the checkpoint that it was loaded from."""

    built: BuiltEngine
    checkpoint: Checkpoint
    threads: int


def load_engine(
    folder: Path,
    config: EngineConfig,
    options: ProfileOptions,
    *,
    progress: LoadProgress | None = None,
    ops: Ops | None = None,
    accelerator: Accelerator | None = None,
) -> LoadedEngine:
    """Load a model to profile it, with the settings that a replica would load it with.

    Raises CheckpointError and InvalidRequest; a model that no device could run is refused before anything is loaded.

    ops, accelerator  see `build_engine`
    """
    _check_options(folder, config, options)
    running = max(config.max_running, options.batch)
    # Every step needs tokens for prompts beside decodes, or the batch would never be complete.
    budget = max(config.max_batch_tokens, 2 * running)
    config = replace(config, reuse_prefixes=False, max_running=running, max_batch_tokens=budget)
    built = build_engine(folder, config, progress=progress, ops=ops, accelerator=accelerator)
    return LoadedEngine(built, inspect_checkpoint(folder), config.threads or usable_cores())


def _check_options(folder: Path, config: EngineConfig, options: ProfileOptions) -> None:
    if options.batch > MAX_COUNT // 2:
        message = f"batch: {options.batch} is not accepted; expected at most {MAX_COUNT // 2} sequences"
        raise InvalidRequest(message, param="batch")
    context = inspect_checkpoint(folder).config.max_model_len
    max_tokens = min(context, config.max_model_len or context)
    for name, tokens in (("prompt_tokens", options.prompt_tokens), ("context_tokens", options.context_tokens)):
        if tokens is not None and tokens + 1 > max_tokens:
            message = f"{name}: {tokens} and 1 more exceed the context of {max_tokens} tokens"
            raise InvalidRequest(message, param=name)


def profile_engine(
    loaded: LoadedEngine, options: ProfileOptions, progress: Progress = lambda _: None, ceiling: Ceiling | None = None
) -> Profile:
    """Profile a loaded model. ceiling: None measures that of this CPU, or looks up that of the GPU.

    Raises InvalidRequest for a workload that does not fit.
    """
    built = loaded.built
    assert isinstance(built.runner.model, Decoder)
    ops: Any = built.runner.model.ops
    driver = ProfileDriver(built, stored_weights(loaded.checkpoint), open_clock(built.runner.device), options)
    progress(f"prefill of {driver.prompt_tokens} tokens")
    prefill = driver.prefill()
    progress(f"decode of {options.batch} at context {driver.context_tokens}")
    decode = driver.decode()
    if ceiling is None:
        progress("what this device can do")
        ceiling = (
            gpu_ceiling(ops.device_context)
            if hasattr(ops, "device_context")
            else cpu_ceiling(_bytes_read(decode), loaded.threads)
        )
    phases = [_phase(measured, ops, ceiling) for measured in (prefill, decode)]
    return Profile(_about(loaded), built.choices, ceiling, phases)


def _phase(measured: PhaseSamples, ops: Any, ceiling: Ceiling) -> ProfilePhase:
    facts = {name: module_facts(measured.parts[name], seen, ops) for name, seen in measured.seen.items()}

    def roofline(work: CallWork, of: ModuleFacts) -> LeastTime:
        return ceiling.roofline_time(work, of.arithmetic)

    step = build_tree(measured.samples, facts, roofline)
    return ProfilePhase(
        measured.name, measured.workload, measured.tokens, step, measured.plain_s, find_slow_modules(step)
    )


def _bytes_read(decode: PhaseSamples) -> int:
    return sum(work.moved for work in decode.samples[0].work.values())


def _about(loaded: LoadedEngine) -> dict[str, str]:
    info, device = loaded.built.profile.model, loaded.built.runner.device
    about = {
        "model": info.name,
        "family": info.family,
        "layers": str(loaded.checkpoint.config.num_layers),
        "quantization": info.quantization,
        "activations": info.dtype,
    }
    if device.type == "cuda":
        return {**about, "device": loaded.built.profile.device_name}
    return {**about, "device": str(device), "threads": str(loaded.threads)}
