"""Rollouts by operators since a fleet's file was applied: they stay until the file itself says something else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .app import version_of, with_model
from .control.state import State
from .fleet.spec import FleetSpec, model_of

__all__ = ["Rolled", "rolled"]


@dataclass(frozen=True, slots=True)
class Rolled:
    """A rollout of a deployed pool. model: checkpoint that its replicas were rolled to; empty: the file's."""

    version: str
    model: str = ""


def rolled(running: FleetSpec, wanted: FleetSpec, state: State, versions: Mapping[str, str]) -> dict[str, Rolled]:
    """Return by name how pools that have been rolled are to be deployed. A pure function.

    running   the spec that was applied last
    versions  versions that pools have now, as Serve has them
    """
    found = {}
    for pool in wanted.pools:
        old, plan = running.pool(pool.name), state.pools.get(pool.name)
        present = versions.get(pool.name)
        if old is None or plan is None or present is None or model_of(running, old) != model_of(wanted, pool):
            continue
        roll = state.rolls.get(pool.name)
        model = roll.model if roll is not None and roll.version == present else plan.model
        same = version_of(running, old) == version_of(wanted, pool)
        found[pool.name] = Rolled(present if same else version_of(wanted, with_model(pool, model)), model)
    return found
