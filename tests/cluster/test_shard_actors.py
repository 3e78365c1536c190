"""Processes of a model as actors in bundles of a placement group, on a real Ray: what they say, and how they end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from new_weights import changed, of_another, written
from safetensors.torch import load_file
from shard_actors_child import CASES
from thorough import OPTION
from tiny_checkpoints import build_checkpoint

from motley import Engine
from motley.kernels.cpu.c_kernels.native_build import load_library

pytestmark = pytest.mark.skipif(load_library()[0] is None, reason="no C compiler")

SUPPORT = Path(__file__).resolve().parents[1] / "support"
EACH_TIME = (  # each takes some six seconds
    "stages of ranks, one is killed",
    "stages, one is stopped, the first killed",
    "stages on two nodes",
    "stages on two nodes, one is stopped",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("actors") / "model", "llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def other(folder: Path) -> Path:
    return build_checkpoint(folder.parent / "other", "llama", num_hidden_layers=4, seed=1)


@pytest.fixture(scope="module")
def new(folder: Path, other: Path) -> Path:
    """Weights of both stages."""
    return written(folder.parent / "new.safetensors", of_another(folder, other, lambda name: "q_proj" in name))


@pytest.fixture(scope="module")
def found(folder: Path, other: Path, new: Path, pytestconfig: pytest.Config) -> dict[str, dict[str, Any]]:
    """By the name of a case."""
    cases = list(CASES) if pytestconfig.getoption(OPTION) else list(EACH_TIME)
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="m", ignore_cleanup_errors=True) as temp:  # short, for sockets
        child = [sys.executable, str(SUPPORT / "shard_actors_child.py"), str(folder), str(other), str(new), *cases]
        path = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "RAY_TMPDIR": temp, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        ended = subprocess.run(child, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    said: dict[str, dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
    assert list(said) == cases
    return said


def of(found: dict[str, dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Return those of the named cases that were run, one at least."""
    assert set(names) <= set(CASES)
    cases = [found[name] for name in names if name in found]
    assert cases
    return cases


def test_they_say_what_one_process_does(found: dict[str, dict[str, Any]], folder: Path) -> None:
    """Stages to the bit, ranks but for the order of sums; wherever they are."""
    with Engine(folder, dtype="float32", kv_memory_bytes=1 << 20) as whole:
        expected = whole._built.logits((7, 3, 200, 41)).tolist()
    assert found["stages on two nodes"]["said"] == expected
    assert found["stages, one is stopped, the first killed"]["said"] == expected
    for case in of(found, "ranks", "stages of ranks, one is killed", "ranks on two nodes over TCP"):
        for row, other in zip(case["said"], expected, strict=True):
            assert row == pytest.approx(other, abs=1e-4)


def test_those_of_another_node_take_new_weights(
    found: dict[str, dict[str, Any]], folder: Path, new: Path, tmp_path: Path
) -> None:
    """Which each node has a copy of, as long as it is needed."""
    with Engine(
        changed(folder, load_file(new), tmp_path / "changed"), dtype="float32", kv_memory_bytes=1 << 20
    ) as whole:
        expected = whole._built.logits((7, 3, 200, 41)).tolist()
    assert found["stages on two nodes"]["copies"] == 2
    assert found["stages on two nodes"]["said anew"] == expected != found["stages on two nodes"]["said"]


@pytest.mark.thorough
def test_where_a_node_has_another_model_none_serves(found: dict[str, dict[str, Any]], other: Path) -> None:
    case = found["stages on two nodes that have two models"]
    assert "said" not in case
    assert "CheckpointError" in case["raised"]
    assert f"{other} on {socket.gethostname()} · " in case["raised"]


def test_each_process_is_an_actor_in_a_bundle(found: dict[str, dict[str, Any]]) -> None:
    """Processes of one node share memory; those on two do not, and share no prefixes either."""
    assert len(found["stages of ranks, one is killed"]["others"]) == 3
    assert all(len(case["others"]) == 1 for case in of(found, "ranks", "stages on two nodes"))
    for name, case in found.items():
        if "one host" in case:
            assert case["one host"] is ("two nodes" not in name), name
            assert ("several nodes" in case["prefixes"]) is ("two nodes" in name), case["prefixes"]


def test_one_that_is_lost_ends_the_step(found: dict[str, dict[str, Any]]) -> None:
    lost = (
        "stages of ranks, one is killed",
        "ranks, one is stopped",
        "stages on two nodes, one is killed",
        "stages on two nodes, one is stopped",
    )
    for case in of(found, *lost):
        assert "EngineLost: the processes of the model cannot go on, found after " in case["raised"], case
    assert "stage 1 has sent no heartbeat for 5 s" in found["stages on two nodes, one is stopped"]["raised"]


def test_nothing_is_left_whatever_is_killed(found: dict[str, dict[str, Any]]) -> None:
    assert {name: case["left"] for name, case in found.items()} == {name: [] for name in found}


@pytest.mark.thorough
def test_ranks_that_no_way_leads_to_are_told_so(found: dict[str, dict[str, Any]]) -> None:
    raised = found["ranks on two nodes"]["raised"]
    assert "rank 1 is on node" in raised
    assert "but must be on that of its replica" in raised
