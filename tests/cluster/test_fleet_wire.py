"""One dtype of KV for the whole fleet, so that GPUs of every age read what any of them has computed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

from motley.cluster.fleet.deployed.prefix_sharing import PrefixSharing, print_shared_dtype
from motley.cluster.fleet.spec.accepted_capabilities import accepted_capabilities
from motley.cluster.fleet.spec.fleet_changes import list_changes
from motley.cluster.fleet.spec.fleet_file_loader import load_fleet
from motley.cluster.fleet.spec.fleet_spec import FleetSpec, engine_config, fleet_prefix_wire, pool_model
from motley.cluster.fleet.spec.prefix_dtype import CAPABILITY_OF
from motley.cluster.service.deployment.serve_app import pool_version
from motley.kernels.device.device_spec import DeviceSpec
from motley.kernels.device.device_table import DEVICES
from motley.kernels.device.precision import policy_of
from motley.replicas.engine.startup.prefix_setup import engine_kv_identity
from motley.replicas.engine_config import EngineConfig

MIXED = Path(__file__).resolve().parents[2] / "deploy" / "examples" / "mixed.yaml"
REDIS = "redis://redis.internal:6379"
CARDS = {"P40": (6, 1), "T4": (7, 5), "A10": (8, 6), "H100": (9, 0)}
POOLS: list[dict[str, Any]] = [
    {"name": "p40", "accelerator": "P40"},
    {"name": "t4", "compute_capability": "7.5"},
    {"name": "a10", "accelerator": "in(A10, A10G)"},
    {"name": "h100", "compute_capability": ">=9.0"},
]


def fleet(*pools: dict[str, Any], **cache: Any) -> FleetSpec:
    cache = {"store": REDIS, "any_numerics": True} | cache
    return FleetSpec.model_validate({"model": "demo", "pools": list(pools or POOLS), "prefix_cache": cache})


def identity(config: EngineConfig, capability: tuple[int, int], weights: str = "the same") -> bytes:
    """Return the identity of an engine on such a card, which stores activations and KV as its policy says."""
    storage = {"fp16": torch.float16, "bf16": torch.bfloat16}[policy_of(*capability).storage]
    kv = f"-kv-{config.kv_dtype}" if config.kv_dtype else ""
    ops: Any = SimpleNamespace(dtype=storage, arithmetic=f"gpu-{capability}-{storage}-fast{kv}")
    shape = SimpleNamespace(num_layers=28, kv_shape=(4, 128))
    loaded: Any = SimpleNamespace(fingerprint=weights, config=shape)
    return engine_kv_identity(config, loaded, ops, ops.arithmetic)


def identities(spec: FleetSpec) -> dict[str, bytes]:
    """By pool."""
    found = {}
    for pool in spec.pools:
        found[pool.name] = identity(engine_config(spec, pool), CARDS[pool.name.upper()], pool_model(spec, pool))
    return found


@pytest.mark.parametrize("wire", ["auto", "float16", "bfloat16", "int8"])
def test_cards_of_every_age_share_when_the_fleet_says_so_and_not_without(wire: str) -> None:
    assert len(set(identities(fleet(wire=wire)).values())) == 1
    apart = identities(fleet(wire=wire, any_numerics=False))
    assert len(set(apart.values())) == len(CARDS), "within one numerics class nobody reads another's"
    assert not set(apart.values()) & set(identities(fleet(wire=wire)).values())


def test_the_pools_of_the_example_share() -> None:
    spec = load_fleet(MIXED).spec
    assert fleet_prefix_wire(spec)[0] == "float16"
    assert len(spec.pools) == len(CARDS)
    assert len(set(identities(spec).values())) == 1
    said = spec.model_dump(mode="json")
    said["prefix_cache"]["any_numerics"] = False
    assert len(set(identities(FleetSpec.model_validate(said)).values())) == len(CARDS)


def test_kv_in_int8_is_shared_with_others_in_int8_alone() -> None:
    keeping = [{**pool, "engine": {"kv_dtype": "int8"}} if pool["name"] in ("t4", "h100") else pool for pool in POOLS]
    found = identities(fleet(*keeping))
    assert found["t4"] == found["h100"] != found["p40"] == found["a10"]
    assert len(set(identities(fleet(*keeping, wire="int8")).values())) == 1


@pytest.mark.parametrize(
    ("pools", "wire", "why"),
    [
        ([{"name": "a"}], "bfloat16", "each pool is of a CPU, or of 8.0 or above"),
        ([{"name": "a"}, {"name": "b", "accelerator": "in(A100, H100)"}], "bfloat16", "each pool"),
        ([{"name": "a", "compute_capability": ">=8.0"}, {"name": "b", "accelerator": "L4"}], "bfloat16", "each pool"),
        (POOLS, "float16", "pool p40 may be of 6.1, and below 8.0 there is no bf16"),
        ([{"name": "a"}, {"name": "b", "compute_capability": ">=7.0"}], "float16", "pool b may be of 7.0"),
        ([{"name": "a", "accelerator": "in(A100, V100)"}], "float16", "pool a may be of 7.0"),
        ([{"name": "a", "accelerator": "in(A100, X9)"}], "float16", "pool a does not say which GPUs it has"),
        ([{"name": "a", "accelerator": "!T4"}], "float16", "pool a does not say"),
        ([{"name": "a", "device": "cuda"}], "float16", "pool a does not say"),
        ([{"name": "a"}, {"name": "b", "simulate": "P40"}], "bfloat16", "each pool"),
        ([{"name": "a"}, {"name": "b", "accelerator": "T4", "engine": {"kv_dtype": "int8"}}], "bfloat16", "each pool"),
    ],
)
def test_the_dtype_is_settled_by_what_all_pools_can(pools: list[dict[str, Any]], wire: str, why: str) -> None:
    found, reason = fleet_prefix_wire(fleet(*pools))
    assert found == wire
    assert why in reason
    spec = fleet(*pools)
    wires = {pool.name: engine_config(spec, pool).prefix_wire for pool in spec.pools}
    assert wires == {pool["name"]: None if "engine" in pool else wire for pool in pools}


@pytest.mark.parametrize("cache", [{"any_numerics": False}, {"store": "memory"}, {"store": "off"}, {"reuse": False}])
def test_where_nothing_is_shared_between_classes_records_have_kv_as_it_is(cache: dict[str, Any]) -> None:
    assert fleet_prefix_wire(fleet(**cache))[0] is None


def test_accelerators_are_of_the_capability_that_devices_have() -> None:
    """By Ray's own way from a device's name to the label of its node."""
    named = NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type

    def told(device: DeviceSpec) -> list[str]:
        return [each for each in map(named, device.names) if each in CAPABILITY_OF]

    checked = {name: str(device.capability) for device in DEVICES for name in told(device)}
    assert checked.keys() >= {"P100", "P40", "V100", "T4", "A100", "A10", "L4", "H100", "B200"}
    assert checked == {name: CAPABILITY_OF[name] for name in checked}
    assert all(accepted_capabilities(each) for each in CAPABILITY_OF.values())


def test_a_pool_that_changes_what_all_can_replaces_all_replicas() -> None:
    old, new = fleet(POOLS[3]), fleet(POOLS[3], POOLS[1])
    assert pool_version(old, old.pools[0]) != pool_version(new, new.pools[0])
    told = [str(change) for change in list_changes(old, new)]
    assert told == [
        "pool t4: added, target 1",
        "prefix_cache.wire, by its pools: bfloat16 -> float16; all replicas are replaced but those with KV in int8",
    ]
    for cache in ({"wire": "float16"}, {"any_numerics": False}):
        old, new = fleet(POOLS[3], **cache), fleet(POOLS[3], POOLS[1], **cache)
        assert pool_version(old, old.pools[0]) == pool_version(new, new.pools[0])
        assert [change.kind for change in list_changes(old, new)] == ["added"]


def test_what_was_chosen_is_told_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    shared = PrefixSharing(secret=b"s" * 32)
    print_shared_dtype(fleet(), shared)
    line = "prefix cache: pools share KV in float16: pool p40 may be of 6.1, and below 8.0 there is no bf16\n"
    assert capsys.readouterr().err == line
    for cache in ({"wire": "float16"}, {"any_numerics": False}, {"store": "embedded"}):
        print_shared_dtype(fleet(**cache), shared)
    assert not capsys.readouterr().err, "as it was asked for, or nothing is shared"
