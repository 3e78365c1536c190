"""Checks that find, before anything waits, what a fleet's nodes could never hold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.cluster.fleet.control.backend.node_capacity import (
    find_missing_capacity,
    find_overbooking,
    replica_needs,
)
from motley.cluster.fleet.control.backend.pending_reason import NodeResources, combine_needs, pending_reason
from motley.cluster.fleet.spec.fleet_spec import FleetSpec
from motley.cluster.ray_compat.cluster_state import labels_match

T4 = {"ray.io/accelerator-type": "T4", "motley/compute-capability": "7.5"}
PLAIN = {"CPU": 64.0, "memory": 2.0**34}


def node(gpus: float = 0.0, labels: dict[str, str] | None = None, **more: float) -> NodeResources:
    total = {**PLAIN, **({"GPU": gpus} if gpus else {}), **more}
    return NodeResources(labels or {}, total, dict.fromkeys(total, 0.0))  # nothing is free: it is asked what there is


def fleet(*pools: dict[str, Any]) -> FleetSpec:
    return FleetSpec.model_validate(
        {"model": "m", "pools": [{"name": f"p{number}", **pool} for number, pool in enumerate(pools)]}
    )


def found(spec: FleetSpec, *nodes: NodeResources) -> list[tuple[int, str, str]]:
    return [(one.pool, one.entry, one.message) for one in find_missing_capacity(spec, nodes, labels_match)]


BUNDLES = [{"cpus": 2}, {"cpus": 2}]


@pytest.mark.parametrize(
    ("pool", "nodes", "entry", "words"),
    [
        ({"device": "cuda"}, [node()], "device", "a replica wants 1 GPU: no node has a GPU that Ray finds"),
        ({"device": "cuda", "tensor_parallel": 4}, [node(2)], "device", "wants 4 GPUs: the most on a node is 2"),
        ({"device": "cuda:2"}, [node(2)], "device", "cuda:2 is not there: the most on a node is 2"),
        ({"device": "cuda:1", "tensor_parallel": 2}, [node(2)], "device", "cuda:1 is not there"),
        ({"device": "cuda:0"}, [node()], "device", "no node has a GPU that Ray finds"),
        ({"accelerator": "H100"}, [node(2, T4)], "accelerator", "no node with the label ray.io/accelerator-type=H100"),
        ({"compute_capability": ">=8.0"}, [node(2, T4)], "compute_capability", "motley/compute-capability"),
        ({"compute_capability": "7.5"}, [node(2)], "compute_capability", "motley/compute-capability=7.5"),
        ({"labels": {"zone": "a"}}, [node(), node()], "labels", "no node with the label zone=a, of 2"),
        ({"resources": {"disk": 1}}, [node()], "resources", "no node has 1 disk; the most is 0"),
        ({"cpus": 65}, [node(), node()], "cpus", "no node has 65 CPUs; the most is 64"),
        (
            {"tensor_parallel": 2, "bundles": [{"cpus": 40}, {"cpus": 40}]}, [node(), node()], "bundles",
            "no node has 80 CPUs; the most is 64",
        ),
        (
            {"tensor_parallel": 2, "bundles": BUNDLES, "strategy": "STRICT_SPREAD"}, [node()], "strategy",
            "each of 2 bundles wants a node of its own, and there are 1",
        ),
        (
            {"pipeline_parallel": 2, "device": "cuda", "bundles": BUNDLES, "strategy": "SPREAD"}, [node()], "device",
            "wants 2 GPUs: no node has a GPU",
        ),
    ],
)  # fmt: skip
def test_what_is_not_there(pool: dict[str, Any], nodes: list[NodeResources], entry: str, words: str) -> None:
    [(number, named, message)] = found(fleet({}, pool), *nodes)
    assert (number, named) == (1, entry)
    assert words in message


@pytest.mark.parametrize(
    ("pool", "nodes"),
    [
        ({}, [node()]),
        ({"device": "cuda"}, [node(), node(1)]),
        ({"device": "cuda:1"}, [node(2)]),
        ({"accelerator": "T4", "tensor_parallel": 2}, [node(2, T4)]),
        ({"compute_capability": ">=7.0"}, [node(1, T4)]),
        ({"simulate": "H100"}, [node()]),
        ({"tensor_parallel": 2, "bundles": [{"cpus": 40}, {"cpus": 40}], "strategy": "SPREAD"}, [node(), node()]),
        ({"resources": {"disk": 1}}, [node(disk=2.0)]),
    ],
)
def test_what_others_have_taken_may_be_free_again(pool: dict[str, Any], nodes: list[NodeResources]) -> None:
    assert found(fleet(pool), *nodes) == []


def test_more_gpus_than_there_are_for_all_that_start() -> None:
    pools = ({"device": "cuda", "replicas": {"start": 1, "max": 8}}, {}, {"device": "cuda", "replicas": {"start": 2}})
    assert find_overbooking(fleet(*pools), [node(3)]) is None
    lack = find_overbooking(fleet(*pools), [node(2)])
    assert lack is not None
    assert (lack.pool, lack.entry) == (2, "replicas")
    assert lack.message == "with 2 the fleet starts with 3 GPUs, and there are 2"
    none = find_overbooking(fleet({"device": "cuda", "replicas": {"start": 0, "min": 0}}, {}), [node()])
    assert none is None, "it waits for what may come"


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 4), st.sampled_from([None, *T4.values()]),
    st.booleans(),
)  # fmt: skip
def test_it_is_told_exactly_where_an_empty_node_would_not_do(
    ranks: list[int], gpus: int, kind: str | None, labelled: bool
) -> None:
    asked = {"7.5": {"compute_capability": "7.5"}, "T4": {"accelerator": "T4"}}.get(kind or "", {"device": "cuda"})
    spec = fleet(*({"tensor_parallel": each, **asked} for each in ranks))
    there = node(gpus, T4 if labelled else {})
    empty = NodeResources(there.labels, there.total, there.total)
    never = {
        at
        for at, pool in enumerate(spec.pools)
        if pending_reason([combine_needs(replica_needs(pool))], [empty], matches=fits)
    }
    assert {number for number, _, _ in found(spec, there)} == never


def fits(labels: Any, wanted: Any) -> bool:
    return bool(labels_match(labels, wanted))


@pytest.mark.parametrize(
    ("pool", "kinds"),
    [
        ({"accelerator": "in(A10, T4, L4)"}, ("A10", "T4", "L4")),
        ({"labels": {"ray.io/accelerator-type": "in(A10, T4)"}}, ("A10", "T4")),
        ({"labels": {"ray.io/accelerator-type": "!in(P40, L4)"}}, ("A10", "T4")),
    ],
)
def test_each_of_several_that_are_named_will_do(pool: dict[str, Any], kinds: tuple[str, ...]) -> None:
    """Ray itself does not find what stands after a comma and a blank."""
    for kind in ("A10", "T4", "L4", "P40"):
        there = node(1, {"ray.io/accelerator-type": kind})
        assert (found(fleet(pool), there) == []) is (kind in kinds)


@pytest.mark.parametrize("capability", ["8.0", "8.6", "9.0", "12.0", "7.5"])
def test_every_capability_from_the_least_on_will_do(capability: str) -> None:
    there = node(1, {"motley/compute-capability": capability})
    assert (found(fleet({"compute_capability": ">=8.0"}), there) == []) is (capability != "7.5")
