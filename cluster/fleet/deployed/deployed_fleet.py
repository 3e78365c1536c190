"""Record of what has been deployed, kept in the cluster for commands that change it and for every new ingress."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ...ray_compat.cluster_state import read_record, write_record
from ..spec.fleet_spec import FleetSpec
from .prefix_sharing import PrefixSharing

_KEY = b"deployed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedFleet:
    """The deployed fleet, and what else its deployment needs.

    own_key   SHA-256 of the key with which the deployer checks the ports; empty without keys
    folder    folder of the logs; None: stderr
    by_file   it was deployed from a fleet file; flags may have set what no fleet file can
    prefixes  how its replicas share prefixes
    """

    fleet: FleetSpec
    own_key: str = ""
    folder: Path | None = None
    by_file: bool = True
    prefixes: PrefixSharing | None = None


def write_deployed(deployed: DeployedFleet) -> None:
    """Write the record into Ray's GCS, which the cluster's token protects."""
    prefixes = deployed.prefixes
    whole = {
        "fleet": deployed.fleet.model_dump(mode="json"),
        "own_key": deployed.own_key,
        "folder": None if deployed.folder is None else str(deployed.folder),
        "by_file": deployed.by_file,
        "prefixes": None if prefixes is None else {"own": prefixes.own, "secret": prefixes.secret.hex()},
    }
    write_record(_KEY, json.dumps(whole).encode())


def read_deployed() -> DeployedFleet | None:
    """Return the record, or None if nothing has been deployed."""
    found = read_record(_KEY)
    if found is None:
        return None
    whole = json.loads(found)
    folder, prefixes = whole["folder"], whole["prefixes"]
    return DeployedFleet(
        fleet=FleetSpec.model_validate(whole["fleet"]),
        own_key=whole["own_key"],
        folder=None if folder is None else Path(folder),
        by_file=whole["by_file"],
        prefixes=None
        if prefixes is None
        else PrefixSharing(own=prefixes["own"], secret=bytes.fromhex(prefixes["secret"])),
    )
