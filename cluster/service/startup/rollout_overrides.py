"""Rollouts by operators since a fleet's file was applied: they stay until the file itself says something else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...fleet.control.state.control_state import ControlState
from ...fleet.spec.fleet_spec import FleetSpec, pool_model
from ..deployment.serve_app import pool_version, with_model


@dataclass(frozen=True, slots=True)
class RolloutOverride:
    """A rollout of a deployed pool. model: checkpoint that its replicas were rolled to; empty: the file's."""

    version: str
    model: str = ""


def rollout_overrides(
    running: FleetSpec, desired: FleetSpec, state: ControlState, versions: Mapping[str, str]
) -> dict[str, RolloutOverride]:
    """Return by name how pools that have been rolled are to be deployed. A pure function.

    running   the spec that was applied last
    versions  versions that pools have now, as Serve has them
    """
    found = {}
    for pool in desired.pools:
        old, plan = running.pool(pool.name), state.pools.get(pool.name)
        current = versions.get(pool.name)
        if old is None or plan is None or current is None or pool_model(running, old) != pool_model(desired, pool):
            continue
        roll = state.rolls.get(pool.name)
        model = roll.model if roll is not None and roll.version == current else plan.model
        same = pool_version(running, old) == pool_version(desired, pool)
        found[pool.name] = RolloutOverride(current if same else pool_version(desired, with_model(pool, model)), model)
    return found
