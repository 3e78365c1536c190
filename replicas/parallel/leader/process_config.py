"""Device and threads of each process of a divided model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ....kernels.cpu.c_kernels.native_build import load_library
from ...engine_config import EngineConfig
from ...errors import InvalidRequest
from ...host.cpu_cores import usable_cores
from .launcher import FollowerLauncher, SubprocessLauncher


def is_parallel(config: EngineConfig) -> bool:
    """Return whether several processes have a part of the model each."""
    return config.tensor_parallel > 1 or config.pipeline_parallel > 1


def process_config(
    config: EngineConfig, launcher: FollowerLauncher | None = None, *, given: bool = False
) -> EngineConfig:
    """Return the first process's configuration, with its device and its CPU threads: its share, or what the launcher
    says.

    given  whether its operators, and maybe an accelerator, are passed in, so that the configured device is not looked
           for

    Raises InvalidRequest for what ranks and stages do not support.
    """
    launcher = launcher or SubprocessLauncher()
    ranks = config.tensor_parallel > 1
    param, what = ("tensor_parallel", "ranks") if ranks else ("pipeline_parallel", "stages")
    devices = process_devices(config, launcher)
    if ranks and set(devices) == {"cpu"} and not given and launcher.host() is None and load_library()[0] is None:
        raise InvalidRequest(
            f"{param}: {what} need the C kernels, which are not available: {load_library()[1]}", param=param
        )
    if config.swap_memory_bytes and len({_kind(device) for device in devices}) > 1:
        message = f"swap_memory_bytes: KV of {what} on GPUs and on CPUs is not kept on the host"
        raise InvalidRequest(message, param="swap_memory_bytes")
    if not given:
        _check_gpus([device for number, device in enumerate(devices) if launcher.device(number) is None], param)
    threads = launcher.threads(0)
    if threads is None:
        computing = sum(_kind(device) != "cuda" for device in devices) or len(devices)
        threads = max(1, (config.threads or usable_cores()) // computing)
    return replace(config, device=devices[0], threads=threads)


def process_devices(config: EngineConfig, launcher: FollowerLauncher | None = None) -> list[str]:
    """Return the device of each process, stage by stage: what the launcher says, or what is configured.

    A GPU that is configured with a number gives it to the first process of its stage, and the following numbers to the
    other ranks and to later stages that have none.
    """
    launcher = launcher or SubprocessLauncher()
    stages = config.device.split(",")
    named = stages if len(stages) > 1 else [stages[0], *[_kind(stages[0])] * (config.pipeline_parallel - 1)]
    found: list[str] = []
    after = 0  # the number of the next GPU
    for device in named:
        if _kind(device) == "cuda":
            first = int(device.partition(":")[2] or after)
            after = first + config.tensor_parallel
            found += [f"cuda:{number}" for number in range(first, after)]
        else:
            found += [device] * config.tensor_parallel
    return [launcher.device(number) or device for number, device in enumerate(found)]


def _check_gpus(devices: Sequence[str], param: str) -> None:
    """Raise InvalidRequest for GPUs that this machine lacks, or that two processes would share."""
    gpus = sorted(int(device.partition(":")[2]) for device in devices if _kind(device) == "cuda")
    if len(set(gpus)) < len(gpus):
        raise InvalidRequest(
            f"device: {','.join(devices)} is not accepted; expected a GPU of its own for each process", param="device"
        )
    if gpus and gpus[-1] >= (here := torch.cuda.device_count()):
        raise InvalidRequest(
            f"{param}: {len(gpus)} processes want a GPU each, cuda:{gpus[0]} to cuda:{gpus[-1]}, and "
            f"torch can use {here} here; motley doctor tells why",
            param=param,
        )


def _kind(device: str) -> str:
    """Return a device's kind if it is well formed, as "cuda" for "cuda:1"; otherwise an empty string, since the
    operators refuse such a device later.
    """
    kind, _, index = device.partition(":")
    return kind if not index or index.isdigit() else ""
