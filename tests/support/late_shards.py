"""Engines whose model is divided among processes on the stand-in for a GPU, some of them on a CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from late_device import LateDevice, LateOps
from late_follower import LateProcesses
from serve_process import alive, children, command_line

from motley.replicas.engine.startup.engine_builder import BuiltEngine, build_engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.kv.store.store_access import PrefixStoreAccess

RANKS: dict[str, Any] = {"tensor_parallel": 2}
STAGES: dict[str, Any] = {"pipeline_parallel": 2, "pipeline_layers": (1, 3)}
MIXED: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
    "GPU, CPU": (["on_cpu"], STAGES),
    "CPU, GPU, CPU": (
        ["serves", "on_cpu"],
        {"device": "cpu,cuda,cpu", "pipeline_parallel": 3, "pipeline_layers": (1, 2, 1)},
    ),
    "two CPUs, two GPUs": (["on_cpu", "serves", "serves"], RANKS | STAGES | {"device": "cpu,cuda"}),
}
KV_BYTES = 1 << 20


def built(
    folder: Path,
    what: str | Sequence[str] = "serves",
    says: Sequence[dict[str, Any]] = (),
    stand_in: LateDevice | None = None,
    access: PrefixStoreAccess | None = None,
    **way: Any,
) -> BuiltEngine:
    """The first process on a GPU too, that stand-in, unless the devices of all are named. access: to a store."""
    given = {"dtype": "float32", "threads": 1, "kv_memory_bytes": KV_BYTES, "max_running": 6, "max_batch_tokens": 64}
    config, launcher = EngineConfig(**{**given, **way}), LateProcesses(what, says)
    if config.device != "cpu":
        return build_engine(folder, config, launcher=launcher, access=access)
    stand_in = stand_in or LateDevice()
    return build_engine(folder, config, ops=LateOps(), accelerator=stand_in, launcher=launcher, access=access)


def followers() -> list[int]:
    return [pid for pid in children(os.getpid()) if "late_follower" in command_line(pid) and alive([pid])]
