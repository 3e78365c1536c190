"""Launchers of the other processes of a model: by default subprocesses, which say at once that they live."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from decoder_steps import exact_ops
from tiny_checkpoints import build_checkpoint

from motley.replicas.capacity.device_fit import local_cpu
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import EngineFault
from motley.replicas.model.checkpoint_inspection import Checkpoint, inspect_checkpoint
from motley.replicas.parallel.leader import follower_group
from motley.replicas.parallel.leader.follower_group import FollowerGroup
from motley.replicas.parallel.leader.launcher import ProcessHandle, SubprocessLauncher
from motley.replicas.parallel.leader.process_config import process_config
from motley.replicas.parallel.planning.device_report import DeviceReport, device_report

pytestmark = pytest.mark.started


class Counted(SubprocessLauncher):
    """A launcher that gives each process more threads than the one before it."""

    def threads(self, number: int) -> int | None:
        return 3 + number


class Noted:
    """In the place of a member: what it would be told."""

    def __init__(self, number: int, start: Mapping[str, Any], *given: object) -> None:
        self.number, self.threads = number, start["config"]["threads"]
        self.name, self.doing, self.heard, self.starting = "", "", 0.0, False
        self.still_s = 0.0

    def kill(self) -> None:
        return None

    def mark_lost(self) -> None:
        return None

    def close(self) -> None:
        return None


def of_cpu(checkpoint: Checkpoint) -> DeviceReport:
    return device_report(checkpoint, local_cpu(exact_ops))


def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: SubprocessLauncher) -> list[tuple[int, int]]:
    """Return each process's number and its threads, the first one's among them."""
    monkeypatch.setattr(follower_group, "FollowerHandle", Noted)
    checkpoint = inspect_checkpoint(build_checkpoint(tmp_path / "model"))
    config = process_config(EngineConfig(pipeline_parallel=3, threads=6), launcher)
    assert config.threads is not None
    found = FollowerGroup(checkpoint, config, ["cpu"] * 3, of_cpu(checkpoint), launcher)
    try:
        others = [(each.number, each.threads) for each in found._followers]  # type: ignore[attr-defined]
        return [(0, config.threads), *others]
    finally:
        found.close()


def test_each_process_has_its_share_of_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(tmp_path, monkeypatch, SubprocessLauncher()) == [(0, 2), (1, 2), (2, 2)]


def test_each_process_has_the_threads_that_its_launcher_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(tmp_path, monkeypatch, Counted()) == [(0, 3), (1, 4), (2, 5)]


def test_where_one_cannot_be_started_nothing_is_left(tmp_path: Path) -> None:
    class Refuses(SubprocessLauncher):
        def launch(self, number: int, name: str, ends: Mapping[str, int]) -> ProcessHandle:
            if number == 2:
                raise EngineFault("no place for it")
            return super().launch(number, name, ends)

    checkpoint = inspect_checkpoint(build_checkpoint(tmp_path / "model"))
    config = process_config(EngineConfig(dtype="float32", pipeline_parallel=3, threads=3))
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(EngineFault, match="no place for it"):
        FollowerGroup(checkpoint, config, ["cpu"] * 3, of_cpu(checkpoint), Refuses())
    assert set(os.listdir("/proc/self/fd")) <= before
