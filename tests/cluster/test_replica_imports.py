"""Modules that a replica's process imports before it loads anything: each is time without that replica."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ray import cloudpickle

from motley.cluster.fleet.deployed.prefix_sharing import PrefixSharing
from motley.cluster.fleet.spec.fleet_spec import FleetSpec
from motley.cluster.service.deployment.serve_app import build_app

LOADS = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    made = pickle.load(file)
print(made)
print(*sorted(name for name in sys.modules if name.startswith("motley.cluster.") or name in ("torch", "redis")))
"""


def test_it_is_what_a_replica_needs_and_not_what_deploys_it(tmp_path: Path) -> None:
    spec = FleetSpec.model_validate({"model": "demo", "pools": [{"name": "cpu"}]})
    app = build_app(spec, prefixes=PrefixSharing(own="unix:///nowhere", secret=bytes(32)))
    pools = app._bound_deployment.init_args[1]
    deployment = pools["cpu"]._bound_deployment
    (tmp_path / "pickled").write_bytes(cloudpickle.dumps((deployment.func_or_class, deployment.init_args)))
    answer = subprocess.run(
        [sys.executable, "-c", LOADS, str(tmp_path / "pickled")], capture_output=True, text=True, check=True, timeout=60
    )
    made, imported = answer.stdout.splitlines()
    assert "redis_prefix_access" in made, "prefixes are shared"
    assert "engine_worker" in made
    names = set(imported.split())
    assert "motley.cluster.metrics.replica_metrics" in names
    for name in (
        "motley.cluster.service.deployment.serve_app",
        "motley.cluster.service.deployment.ingress",
        "motley.cluster.fleet.spec.fleet_spec",
        "motley.cluster.routing.router",
        "torch",
        "redis",
    ):
        assert name not in names
