"""Nodes that say they have GPUs: each pool lands on its class, and one replica too many says why it lands nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from service_checkpoint import write_tokenizer

SUPPORT = Path(__file__).resolve().parents[1] / "support"
POOLS = """
pools:
  - {name: old, accelerator: T4, replicas: {max: 2}}
  - {name: exact, compute_capability: 8.6}
  - {name: new, compute_capability: ">=8.9", labels: {rack: of-H100}}
  - {name: none, cpus: 2}
"""


@pytest.mark.thorough
def test_each_pool_lands_on_its_class(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(f"model: {write_tokenizer(tmp_path)}{POOLS}")
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="m", ignore_cleanup_errors=True) as temp:  # short, for sockets
        child = [sys.executable, str(SUPPORT / "fake_nodes_child.py"), str(tmp_path / "fleet.yaml")]
        path = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "RAY_TMPDIR": temp, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        ended = subprocess.run(child, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    reported = json.loads(ended.stdout.splitlines()[-1])
    found = reported["placed"]
    assert {name: found[name] for name in ("old", "exact", "new")} == {
        "old": "T4", "exact": "A10", "new": "H100",
    }  # fmt: skip
    assert "none" in found, "a pool without a GPU goes wherever there is room"
    assert reported["pending"] == ["no GPU free: 1 GPU wanted, the most on a node is 0"]
