"""Why a replica has no place: the true reason, by what it needs and what nodes have."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.cluster.fleet.control.backend.pending_reason import NodeResources, ResourceNeed, pending_reason
from motley.cluster.fleet.control.backend.serve_backend import _needs
from motley.cluster.ray_compat.cluster_state import labels_match
from motley.cluster.ray_compat.serve_controller import DeployedSettings

T4 = {"ray.io/accelerator-type": "T4"}
HEAD = NodeResources({}, {"CPU": 2.0}, {"CPU": 0.0})
GPU = NodeResources(
    T4, {"CPU": 8.0, "GPU": 2.0, "accelerator_type:T4": 1.0}, {"CPU": 8.0, "GPU": 0.0, "accelerator_type:T4": 1.0}
)
ROOM = NodeResources({}, {"CPU": 8.0, "GPU": 1.0}, {"CPU": 0.5, "GPU": 1.0})


@pytest.mark.parametrize(
    ("needs", "nodes", "words"),
    [
        ([ResourceNeed({"GPU": 1.0}, T4)], [HEAD], "no node with the label ray.io/accelerator-type=T4, of 1"),
        ([ResourceNeed({"GPU": 1.0}, T4)], [HEAD, GPU], "no GPU free: 1 GPU wanted, the most on a node is 0"),
        ([ResourceNeed({"GPU": 4.0}, T4)], [HEAD, GPU], "no node has 4 GPUs; the most is 2"),
        ([ResourceNeed({"accelerator_type:H100": 0.001, "GPU": 1.0})], [HEAD, GPU], "no node has a GPU of type H100"),
        ([ResourceNeed({"CPU": 1.0})], [HEAD], "no CPU free: 1 CPU wanted, the most on a node is 0"),
        ([ResourceNeed({"CPU": 1.0}, {"zone": "in(a,b)"})], [HEAD], "no node with the label zone=in(a,b), of 1"),
        ([ResourceNeed({"CPU": 1.0})], [], "no node"),
        ([ResourceNeed({"CPU": 1.0, "GPU": 1.0})], [GPU, ROOM], "no node has 1 CPU and 1 GPU free together"),
        (
            [ResourceNeed({"CPU": 1.0}), ResourceNeed({"GPU": 1.0}, T4)],
            [GPU],
            "no GPU free: 1 GPU wanted, the most on a node is 0",
        ),
        ([ResourceNeed({"GPU": 1.0})], [ROOM], ""),
        ([ResourceNeed()], [HEAD], ""),
    ],
)
def test_reasons(needs: list[ResourceNeed], nodes: list[NodeResources], words: str) -> None:
    found = pending_reason(needs, nodes, labels_match)
    assert found == words or (words == "no node" and found.startswith(words))


@pytest.mark.parametrize(
    ("strategy", "needs"),
    [
        ("STRICT_PACK", [ResourceNeed({"CPU": 3.0, "disk": 1.0}, {"rack": "r3"})]),
        ("SPREAD", [ResourceNeed({"CPU": 1.0}, {"rack": "r3"}), ResourceNeed({"CPU": 2.0, "disk": 1.0})]),
    ],
)
def test_bundles_of_one_node_need_room_on_it_together(strategy: str, needs: list[ResourceNeed]) -> None:
    bundles = [{"CPU": 1.0}, {"CPU": 2.0, "disk": 1.0}]
    settings = DeployedSettings(version="1", bundles=bundles, bundle_labels=[{"rack": "r3"}], strategy=strategy)
    assert _needs(settings) == needs


amounts = st.dictionaries(st.sampled_from(["CPU", "GPU", "disk"]), st.sampled_from([0.5, 1.0, 2.0]), max_size=3)
nodes = st.lists(st.builds(lambda labels, total: NodeResources(labels, total, total), st.just({}), amounts), max_size=4)


def _any(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    return True


@given(st.builds(ResourceNeed, amounts), nodes)
def test_there_is_a_reason_if_and_only_if_no_node_has_it_all(need: ResourceNeed, there: list[NodeResources]) -> None:
    fits = any(all(node.free.get(name, 0) >= wanted for name, wanted in need.resources.items()) for node in there)
    assert (pending_reason([need], there, _any) == "") == fits
