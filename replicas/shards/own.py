"""What each process of a divided model has for itself: its device, its threads."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...kernels.cpu.build import library
from ..cores import usable_cores
from ..engine_config import EngineConfig
from ..errors import InvalidRequest
from .launch import Launcher, Subprocesses

__all__ = ["config_of_process", "devices_of", "is_divided"]


def is_divided(config: EngineConfig) -> bool:
    """Whether more than one process has a part of the model."""
    return config.tensor_parallel > 1 or config.pipeline_parallel > 1


def config_of_process(config: EngineConfig, launcher: Launcher | None = None, *, given: bool = False) -> EngineConfig:
    """Of the first, with its device and its threads: a share, or what the launcher says.

    given  its operators, and maybe an accelerator, are: whatever its device is called, nobody looks for it

    Raises InvalidRequest for what ranks and stages cannot do.
    """
    launcher = launcher or Subprocesses()
    ranks = config.tensor_parallel > 1
    param, what = ("tensor_parallel", "ranks") if ranks else ("pipeline_parallel", "stages")
    processes = config.tensor_parallel * config.pipeline_parallel
    if ranks and config.device == "cpu" and not given and launcher.host() is None and library()[0] is None:
        raise InvalidRequest(f"{param}: {what} need the C kernels: {library()[1]}", param=param)
    if config.swap_memory_bytes:
        message = f"swap_memory_bytes: preempted KV of several {what} is computed again so far"
        raise InvalidRequest(message, param="swap_memory_bytes")
    if _kind(config.device) == "cuda" and launcher.device(0) is None and not given:
        first, here = _index(config.device), torch.cuda.device_count()
        if first + processes > here:
            raise InvalidRequest(
                f"{param}: {processes} processes want a GPU each, cuda:{first} to cuda:{first + processes - 1}, and "
                f"torch can use {here} here; motley doctor tells why",
                param=param,
            )
    threads = launcher.threads(0)
    if threads is None:
        threads = max(1, (config.threads or usable_cores()) // processes)
    return replace(config, device=devices_of(config, launcher)[0], threads=threads, swap_memory_bytes=0)


def devices_of(config: EngineConfig, launcher: Launcher | None = None) -> list[str]:
    """Of each process, stage by stage: what its launcher says, or as configured, of GPUs one after the other."""
    launcher = launcher or Subprocesses()
    first = _index(config.device) if _kind(config.device) == "cuda" else None
    return [
        launcher.device(number) or (f"cuda:{first + number}" if first is not None and number else config.device)
        for number in range(config.tensor_parallel * config.pipeline_parallel)
    ]


def _kind(device: str) -> str:
    """Of one that can be counted from; of what is no device, nothing: whoever asks for its operators refuses it."""
    kind, _, index = device.partition(":")
    return kind if not index or index.isdigit() else ""


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)
