"""What starts the other processes of a model: by default subprocesses, which say at once that they live."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from steps import exact_ops
from tiny_checkpoints import build_checkpoint

from motley.replicas.checkpoint import Checkpoint, inspect_checkpoint
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import EngineFault
from motley.replicas.fit import cpu
from motley.replicas.shards import group
from motley.replicas.shards.group import Group
from motley.replicas.shards.launch import Handle, Subprocesses
from motley.replicas.shards.own import config_of_process
from motley.replicas.shards.places import Account, account_of

pytestmark = pytest.mark.started


class Counted(Subprocesses):
    """With more threads for each process than for the one before it."""

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

    def says_no_more(self) -> None:
        return None

    def close(self) -> None:
        return None


def of_cpu(checkpoint: Checkpoint) -> Account:
    return account_of(checkpoint, cpu(exact_ops))


def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: Subprocesses) -> list[tuple[int, int]]:
    """Of each process its number and its threads, the first one's among them."""
    monkeypatch.setattr(group, "Member", Noted)
    checkpoint = inspect_checkpoint(build_checkpoint(tmp_path / "model"))
    config = config_of_process(EngineConfig(pipeline_parallel=3, threads=6), launcher)
    assert config.threads is not None
    found = Group(checkpoint, config, ["cpu"] * 3, of_cpu(checkpoint), launcher)
    try:
        others = [(each.number, each.threads) for each in found._followers]  # type: ignore[attr-defined]
        return [(0, config.threads), *others]
    finally:
        found.close()


def test_each_process_has_its_share_of_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(tmp_path, monkeypatch, Subprocesses()) == [(0, 2), (1, 2), (2, 2)]


def test_each_process_has_the_threads_that_its_launcher_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(tmp_path, monkeypatch, Counted()) == [(0, 3), (1, 4), (2, 5)]


def test_where_one_cannot_be_started_nothing_is_left(tmp_path: Path) -> None:
    class Refuses(Subprocesses):
        def launch(self, number: int, name: str, ends: Mapping[str, int]) -> Handle:
            if number == 2:
                raise EngineFault("no place for it")
            return super().launch(number, name, ends)

    checkpoint = inspect_checkpoint(build_checkpoint(tmp_path / "model"))
    config = config_of_process(EngineConfig(dtype="float32", pipeline_parallel=3, threads=3))
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(EngineFault, match="no place for it"):
        Group(checkpoint, config, ["cpu"] * 3, of_cpu(checkpoint), Refuses())
    assert set(os.listdir("/proc/self/fd")) <= before
