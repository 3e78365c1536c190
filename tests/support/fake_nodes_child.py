"""In a process of its own: a fleet on nodes that only say they have GPUs. Prints who is where, and why others wait."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from functools import partial
from pathlib import Path

import ray
from echo_worker import EchoWorker
from ray.cluster_utils import Cluster

from motley.cluster.fleet.control.backend.serve_backend import ServeBackend
from motley.cluster.fleet.control.reconciler.fleet_reconciler import FleetReconciler
from motley.cluster.fleet.control.state.control_state import ControlState
from motley.cluster.fleet.deployed.deployed_fleet import DeployedFleet, write_deployed
from motley.cluster.fleet.spec.fleet_file_loader import load_fleet
from motley.cluster.fleet.spec.ray_placement import ACCELERATOR, COMPUTE_CAPABILITY
from motley.cluster.ray_compat.serve_controller import application_details
from motley.cluster.ray_compat.serve_deployments import deploy_application
from motley.cluster.routing.ingress_broadcast import APPLICATION
from motley.cluster.service.deployment.serve_app import build_app

CARDS = {"T4": "7.5", "A10": "8.6", "H100": "9.0"}
START_S = 120.0


def main(fleet: Path) -> dict[str, object]:
    """placed: accelerators of the nodes where pools are, None of one without; pending: as `why` has it."""
    small = {"num_cpus": 4, "object_store_memory": 2**27}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        for card, capability in CARDS.items():
            labels = {ACCELERATOR: card, COMPUTE_CAPABILITY: capability, "rack": f"of-{card}"}
            cluster.add_node(num_gpus=1, labels=labels, **small)
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        spec = load_fleet(fleet).spec
        write_deployed(DeployedFleet(fleet=spec))
        app = build_app(spec, partial(EchoWorker, spec.model))
        deploy_application(app, APPLICATION)
        return {"placed": where(len(spec.pools)), "pending": asyncio.run(why("old", 2))}
    finally:
        ray.shutdown()
        cluster.shutdown()


def where(count: int) -> dict[str, str | None]:
    labels = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
    deadline = time.monotonic() + START_S
    while True:
        pools = (application_details(APPLICATION) or {})["deployments"]
        found = {
            name: labels[replica["node_id"]].get(ACCELERATOR)
            for name, pool in pools.items()
            for replica in pool["replicas"]
            if name != "ingress" and replica["state"] == "RUNNING"
        }
        if len(found) == count:
            return found
        assert time.monotonic() < deadline, pools
        time.sleep(0.1)


async def why(pool: str, replicas: int) -> list[str]:
    """Return the control plane's reasons for a pool that is to have more replicas than find a place."""
    plane = FleetReconciler(ServeBackend(APPLICATION, lambda models: None), Forgetful(), ControlState())
    await plane.step()
    await plane.scale(pool, replicas, by="test", reason="why")
    deadline = time.monotonic() + START_S
    while not plane.pending.get(pool, "").startswith("no "):
        assert time.monotonic() < deadline, plane.state.events
        await asyncio.sleep(0.1)
        await plane.step()
    assert plane.snapshots[pool].target == replicas
    assert len(plane.snapshots[pool].running) == replicas - 1
    return [event.reason for event in plane.state.events if event.kind == "pending"][-1:]


class Forgetful:
    async def keep(self, state: ControlState) -> None:
        pass


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
