"""From one fleet to another: what changes, what is replaced, and that targets stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.cluster.fleet.control.backend.planned_fleet import plan_from_spec
from motley.cluster.fleet.control.state.control_state import ControlState, PoolPlan, PoolRollout
from motley.cluster.fleet.control.state.decisions import take_over_deployment
from motley.cluster.fleet.spec.fleet_changes import list_changes, refuse_fixed_changes, targets_after_change
from motley.cluster.fleet.spec.fleet_file_loader import load_fleet
from motley.cluster.fleet.spec.fleet_spec import FleetSpec
from motley.cluster.fleet.spec.pool_spec import PoolSpec
from motley.cluster.service.deployment.serve_app import ingress_version, pool_version
from motley.cluster.service.startup.rollout_overrides import RolloutOverride, rollout_overrides
from motley.cluster.service_errors import ConfigurationError

names = st.sampled_from(["p40", "t4", "a10", "cpu"])


@st.composite
def ranges(draw: Any) -> dict[str, int]:
    low, start, high = sorted(draw(st.tuples(*[st.integers(0, 5)] * 3)))
    return {"min": low, "start": max(start, 1), "max": max(high, start, 1)}


pools = st.fixed_dictionaries(
    {"name": names, "replicas": ranges()},
    optional={
        "cost_per_hour": st.sampled_from([0.5, 1.0]),
        "labels": st.sampled_from([{}, {"rack": "r1"}]),
        "engine": st.sampled_from([{}, {"max_running": 8}, {"kv_memory": "1MiB"}]),
        "cpus": st.sampled_from([1, 2]),
    },
)


@st.composite
def fleets(draw: Any) -> FleetSpec:
    found = draw(st.lists(pools, min_size=1, max_size=4, unique_by=lambda pool: pool["name"]))
    slo = draw(st.sampled_from([None, {"ttft_ms": 100, "tpot_ms": 10}]))
    return FleetSpec.model_validate({"model": "demo", "pools": found, "slo": slo})


def _by_name(fleet: FleetSpec) -> dict[str, PoolSpec]:
    return {pool.name: pool for pool in fleet.pools}


@given(fleets(), fleets())
def test_what_differs_is_told_and_replicas_are_replaced_where_they_would_be_others(
    old: FleetSpec, new: FleetSpec
) -> None:
    assert list_changes(old, old) == []
    found = list_changes(old, new)
    alike = (_by_name(old), old.slo) == (_by_name(new), new.slo)
    assert bool(found) != alike
    kinds = {(change.pool, change.kind) for change in found}
    for pool in new.pools:
        before = old.pool(pool.name)
        assert ((pool.name, "added") in kinds) == (before is None)
        replaced = before is not None and pool_version(old, before) != pool_version(new, pool)
        assert ((pool.name, "restarted") in kinds) == replaced
    gone = {pool.name for pool in old.pools} - {pool.name for pool in new.pools}
    assert {pool for pool, kind in kinds if kind == "removed"} == gone
    assert ingress_version(old) == ingress_version(new), "it stays, whatever the pools do"


@given(fleets(), fleets(), st.dictionaries(names, st.integers(0, 9)))
def test_targets_stay_within_bounds(old: FleetSpec, new: FleetSpec, now: dict[str, int]) -> None:
    targets, told = targets_after_change(old, new, now)
    assert targets.keys() == {pool.name for pool in new.pools}
    moved = set()
    for pool in new.pools:
        asked = now[pool.name] if old.pool(pool.name) is not None and pool.name in now else pool.replicas.start
        bounds = range(pool.replicas.min, pool.replicas.max + 1)
        assert targets[pool.name] in bounds
        assert targets[pool.name] == asked or asked not in bounds
        moved |= {pool.name} if targets[pool.name] != asked else set()
    assert {change.pool for change in told} == moved


@given(fleets(), fleets(), st.dictionaries(names, st.sampled_from(["", "other"])))
def test_what_was_rolled_stays_where_the_file_says_nothing_new(
    old: FleetSpec, new: FleetSpec, models: dict[str, str]
) -> None:
    state = ControlState(pools={name: PoolPlan(1, model=model) for name, model in models.items()})
    found = rollout_overrides(old, new, state, {name: f"{name}, rolled" for name in models})
    assert found.keys() == {pool.name for pool in new.pools if old.pool(pool.name) is not None and pool.name in models}
    for name, one in found.items():
        before, after = old.pool(name), new.pool(name)
        assert before is not None
        assert after is not None
        assert one.model == models[name]
        replaced = pool_version(old, before) != pool_version(new, after)
        assert (one.version == f"{name}, rolled") != replaced


def test_a_file_that_says_another_model_ends_a_roll() -> None:
    def fleet(model: str) -> FleetSpec:
        return FleetSpec.model_validate({"model": "demo", "pools": [{"name": "a", "quantization": {"model": model}}]})

    state = ControlState(deployment="first", pools={"a": PoolPlan(1, model="rolled", said="one")})
    assert rollout_overrides(fleet("one"), fleet("two"), state, {"a": "v"}) == {}
    said = {name: plan_from_spec(fleet(name)) for name in ("one", "two")}
    kept, over = (
        take_over_deployment(state, 0.0, plan.name, plan.pools, plan.policy).pools["a"].model for plan in said.values()
    )
    assert (kept, over) == ("rolled", "")
    under_way = ControlState(pools={"a": PoolPlan(1)}, rolls={"a": PoolRollout("v", "coming")})
    assert rollout_overrides(fleet("one"), fleet("one"), under_way, {"a": "v"})["a"] == RolloutOverride("v", "coming")


def test_every_field_of_a_pool_is_live_or_makes_another_replica() -> None:
    assert PoolSpec.LIVE | {"name"} < set(PoolSpec.model_fields)
    assert set(FleetSpec.FIXED) < set(FleetSpec.model_fields)


@pytest.mark.parametrize(("store", "live"), [("embedded", True), ("redis://somewhere", True), ("memory", False)])
def test_memory_of_the_redis_server_replaces_no_replica(store: str, live: bool) -> None:
    def fleet(memory: str) -> FleetSpec:
        cache = {"store": store, "memory": memory}
        return FleetSpec.model_validate({"model": "demo", "pools": [{"name": "a"}], "prefix_cache": cache})

    old, new = fleet("1GiB"), fleet("2GiB")
    assert (pool_version(old, old.pools[0]) == pool_version(new, new.pools[0])) is live
    [change] = list_changes(old, new)
    assert (change.kind, "replaced" in str(change)) == (("live", False) if live else ("restarted", True))


def test_lines_that_are_shown() -> None:
    def fleet(*pools: dict[str, Any], **more: Any) -> FleetSpec:
        return FleetSpec.model_validate({"model": "demo", "pools": list(pools), **more})

    t4 = {"name": "t4", "replicas": {"max": 2}}
    old = fleet(t4, {"name": "p40"}, {"name": "a10"})
    new = fleet(
        {**t4, "replicas": {"max": 4}},
        {"name": "p40", "engine": {"max_running": 8}},
        {"name": "l4", "replicas": 2},
        slo={"ttft_ms": 500, "tpot_ms": 50},
        prefix_cache={"reuse": False},
    )
    assert [str(change) for change in list_changes(old, new)] == [
        "pool t4: replicas.max 2 -> 4",
        "pool p40: engine.max_running none -> 8; its replicas are replaced",
        "pool l4: added, target 2",
        "pool a10: removed; its streams end, or move after drain_s",
        "prefix_cache.reuse yes -> no; all replicas are replaced",
        "slo none -> {'ttft_ms': 500.0, 'tpot_ms': 50.0, 'shed': False}",
    ]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("model: other\npools: [{name: a}]\n", r":1:8: model: other is not what runs \(demo\), and cannot change"),
        (
            "model: demo\npools: [{name: a}]\nlisten: {http_port: 81}\n",
            r":3:21: listen\.http_port: 81 is not what runs",
        ),
        (
            "model: demo\npools: [{name: a}]\nsecurity: {open_health: true}\n",
            r":3:25: security\.open_health: yes is not",
        ),
    ],
)
def test_what_cannot_change_is_refused_with_its_line(tmp_path: Path, said: str, told: str) -> None:
    (tmp_path / "fleet.yaml").write_text(said)
    running = FleetSpec.model_validate({"model": "demo", "pools": [{"name": "a"}]})
    with pytest.raises(ConfigurationError, match=told):
        refuse_fixed_changes(running, load_fleet(tmp_path / "fleet.yaml"))
