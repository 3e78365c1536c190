"""Profile of a model from its folder: load it, run it, and compare it with what the device can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...kernels.ops import Ops
from ..build import BuiltEngine, build_engine
from ..build import Progress as LoadProgress
from ..checkpoint import Checkpoint, inspect_checkpoint
from ..cores import usable_cores
from ..decoder import Decoder
from ..engine_config import EngineConfig
from ..gpu.accelerator import Accelerator
from .ceiling import Ceiling, Least, of_cpu, of_gpu
from .clock import clock_of
from .drive import Asked, Driver, Measured
from .facts import Facts, facts_of
from .findings import Finding, findings
from .stored import stored_weights
from .tree import Node, tree
from .work import Work

__all__ = ["Asked", "Loaded", "Phase", "Profile", "load", "profile_built"]

Progress = Callable[[str], None]  # called with a description of the present work


@dataclass(frozen=True, slots=True)
class Phase:
    """Profile of one phase, "prefill" or "decode" by `name`.

    step     the tree, with every layer
    plain_s  seconds of the same work without instruments
    tokens   tokens that a step computes (a decode batch), or all steps of a prompt
    """

    name: str
    workload: Mapping[str, int]
    tokens: int
    step: Node
    plain_s: Sequence[float]
    findings: Sequence[Finding]


@dataclass(frozen=True, slots=True)
class Profile:
    """Profile of a model. about: the model and how it was run, in words."""

    about: Mapping[str, str]
    choices: Mapping[str, str]
    ceiling: Ceiling
    phases: Sequence[Phase]


@dataclass(frozen=True, slots=True)
class Loaded:
    """An idle engine, and the checkpoint that it was loaded from."""

    built: BuiltEngine
    checkpoint: Checkpoint
    threads: int


def load(
    folder: Path,
    config: EngineConfig,
    asked: Asked,
    *,
    progress: LoadProgress | None = None,
    ops: Ops | None = None,
    accelerator: Accelerator | None = None,
) -> Loaded:
    """Load a model as a replica does. ops, accelerator: see `build_engine`.

    Raises CheckpointError, InvalidRequest.
    """
    running = max(config.max_running, asked.batch)
    # Every step needs tokens for prompts beside decodes, or the batch would never be complete.
    budget = max(config.max_batch_tokens, 2 * running)
    config = replace(config, reuse_prefixes=False, max_running=running, max_batch_tokens=budget)
    built = build_engine(folder, config, progress=progress, ops=ops, accelerator=accelerator)
    return Loaded(built, inspect_checkpoint(folder), config.threads or usable_cores())


def profile_built(
    loaded: Loaded, asked: Asked, progress: Progress = lambda _: None, ceiling: Ceiling | None = None
) -> Profile:
    """Profile a loaded model. ceiling: None measures that of this CPU, or looks up that of the GPU.

    Raises InvalidRequest for a workload that does not fit.
    """
    built = loaded.built
    assert isinstance(built.runner.model, Decoder)
    ops: Any = built.runner.model.ops
    driver = Driver(built, stored_weights(loaded.checkpoint), clock_of(built.runner.device), asked)
    progress(f"prefill of {driver.prompt_tokens} tokens")
    prefill = driver.prefill()
    progress(f"decode of {asked.batch} at context {driver.context_tokens}")
    decode = driver.decode()
    if ceiling is None:
        progress("what this device can do")
        ceiling = of_gpu(ops.rig) if hasattr(ops, "rig") else of_cpu(_bytes_read(decode), loaded.threads)
    phases = [_phase(measured, ops, ceiling) for measured in (prefill, decode)]
    return Profile(_about(loaded), built.choices, ceiling, phases)


def _phase(measured: Measured, ops: Any, ceiling: Ceiling) -> Phase:
    facts = {name: facts_of(measured.parts[name], seen, ops) for name, seen in measured.seen.items()}

    def least(work: Work, of: Facts) -> Least:
        return ceiling.least(work, of.arithmetic)

    step = tree(measured.samples, facts, least)
    return Phase(measured.name, measured.workload, measured.tokens, step, measured.plain_s, findings(step))


def _bytes_read(decode: Measured) -> int:
    return sum(work.moved for work in decode.samples[0].work.values())


def _about(loaded: Loaded) -> dict[str, str]:
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
