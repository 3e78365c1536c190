"""Routing policies: what each of them must keep, what each is for, and that ingress and fleet file have them all."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.cluster.fleet.spec.fleet_changes import list_changes
from motley.cluster.fleet.spec.fleet_file_loader import load_fleet
from motley.cluster.fleet.spec.fleet_schema import fleet_schema
from motley.cluster.fleet.spec.fleet_spec import FleetSpec
from motley.cluster.routing.directory.replica_directory import PROVEN, ReplicaDirectory
from motley.cluster.routing.policy.predicted_latency import PredictedLatency
from motley.cluster.routing.policy.routing_policies import DEFAULT_POLICY, ROUTING_POLICIES, create_routing_policy
from motley.cluster.routing.policy.routing_policy import RANKS, RoutingPolicy, order_replicas
from motley.cluster.routing.prediction.latency_model import LatencyModel
from motley.cluster.routing.prediction.replica_speeds import profile_speed
from motley.cluster.routing.prediction.routing_candidates import RoutingCandidates
from motley.cluster.routing.prediction.routing_query import RoutingQuery, Slo
from motley.cluster.routing.prefix_index.prefix_hash_chain import PrefixHashChain
from motley.cluster.service.deployment.routing_settings import fleet_routing_config
from motley.cluster.service_errors import ConfigurationError
from motley.cluster.simulation.simulated_fleet import find_model_shape, simulated_fleet
from motley.replicas.errors import InvalidRequest
from motley.replicas.types import ReplicaLoad, ReplicaProfile, Request, SamplingParams

MODEL = find_model_shape("qwen2.5-7b")
SLO = Slo(3.0, 0.1)
MIXED = "2*P40+2*T4+2*A10+2*H100 80GB HBM3"
PUBLIC = sorted(ROUTING_POLICIES)


def profiles(text: str = MIXED) -> list[ReplicaProfile]:
    fleet = simulated_fleet(text, MODEL, 1)
    return [each.profile(f"replica {number}", "pool") for number, each in enumerate(fleet)]


def a_model(every: Sequence[ReplicaProfile], slo: Slo | None = SLO) -> LatencyModel:
    return LatencyModel(list(map(profile_speed, every)), slo, every)


def a_request(tokens: int = 200, *, first: int = 7, salt: bytes = b"") -> Request:
    ids = tuple((first * (at + 1)) % 1000 for at in range(tokens))
    return Request("r", ids, SamplingParams(max_tokens=16, seed=0), cache_salt=salt)


def a_query(request: Request) -> RoutingQuery:
    return RoutingQuery(len(request.prompt_ids), beginning=PrefixHashChain(request).beginning)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.sampled_from(PUBLIC),
    st.booleans(),
    st.sets(st.integers(0, 7)),
    st.lists(st.integers(0, 7), max_size=3),
    st.sets(st.integers(0, 7), max_size=2),
    st.lists(st.integers(0, 40), min_size=8, max_size=8),
)
def test_every_policy_orders_those_that_may_be_chosen(
    name: str, objectives: bool, draining: set[int], last: list[int], others: set[int], running: list[int]
) -> None:
    model, policy = a_model(profiles(), SLO if objectives else None), create_routing_policy(name, random.Random(0))
    for row, count in enumerate(running):
        model.heard(row, ReplicaLoad(running=count, kv_blocks_free=900, kv_blocks_total=1000), 1.0)
    for row in draining:
        model.set_usable(row, usable=False)
    query = replace(a_query(a_request()), last=last, others=others)
    for _ in range(3):
        rows = list(order_replicas(policy, query, model.candidates(1.0, query)))
        assert sorted(rows) == [row for row in range(8) if row not in draining], "all of them, once"
        groups = [(last.count(row), not last.count(row) and row in others) for row in rows]
        assert groups == sorted(groups), "what has failed, or cannot go on with the answer, comes behind"
        if rows:
            policy.sent(query, rows[0])
            policy.ended(query, rows[0])


def test_round_robin_goes_round_and_over_gaps() -> None:
    model, policy, query = a_model(profiles()), create_routing_policy("round_robin"), RoutingQuery(100)
    model.set_usable(3, usable=False)
    seen = []
    for _ in range(14):
        first = policy.order(query, model.candidates(0.0, query))[0]
        assert policy.order(query, model.candidates(0.0, query))[0] == first, "it was not sent there yet"
        policy.sent(query, first)
        seen.append(first)
    assert seen == [0, 1, 2, 4, 5, 6, 7] * 2


def test_requests_in_flight_of_others_count_as_well() -> None:
    model, query = a_model(profiles("4*A10")), RoutingQuery(100)
    for row, (others, own) in enumerate(((5, 0), (0, 3), (1, 1), (4, 0))):
        model.heard(row, ReplicaLoad(running=others), 0.5)
        for _ in range(own):
            model.sent(1.0, row, 100)
    replicas = model.candidates(1.0, query)
    assert replicas.in_flight.tolist() == [5, 3, 2, 4]
    assert create_routing_policy("least_requests").order(query, replicas) == [2, 1, 3, 0]


def test_the_least_work_is_by_speed_and_by_the_length_of_prompts() -> None:
    model, policy, query = a_model(profiles("P40+A10")), create_routing_policy("weighted_least_work"), RoutingQuery(500)
    assert policy.order(query, model.candidates(0.0, query)) == [1, 0]
    sent = []
    while (first := policy.order(query, model.candidates(0.0, query))[0]) == 1:
        policy.sent(query, first)
        model.sent(0.0, first, query.prompt_tokens)
        sent.append(first)
    assert len(sent) > 1, "the faster one has several before the slower one has any"
    long = RoutingQuery(100 * 500)
    short_first = create_routing_policy("weighted_least_work")
    short_first.sent(long, 1)
    model = a_model(profiles("P40+A10"))
    model.sent(0.0, 1, long.prompt_tokens)
    assert short_first.order(query, model.candidates(0.0, query))[0] == 0, "one long prompt is as much as many"
    short_first.ended(long, 1)
    model.done(0.0, 1)
    assert short_first.order(query, model.candidates(0.0, query))[0] == 1


def test_the_same_beginning_goes_to_the_same_replica_from_every_ingress() -> None:
    every = profiles("8*A10")
    turned = [*every[3:], *every[:3]]  # another ingress met them in another order
    here, there = a_model(every), a_model(turned)
    one, other = (create_routing_policy("prefix_affinity", random.Random(seed)) for seed in (1, 2))
    chosen = Counter[str]()
    for first in range(1, 200):
        long, longer = a_query(a_request(200, first=first)), a_query(a_request(150, first=first))
        rows = one.order(long, here.candidates(0.0, long)), other.order(longer, there.candidates(0.0, longer))
        names = [every[rows[0][0]].replica_id, turned[rows[1][0]].replica_id]
        assert names[0] == names[1]
        chosen[names[0]] += 1
    assert len(chosen) == 8
    assert max(chosen.values()) < 3 * 200 / 8
    salted = [a_query(a_request(salt=salt)).beginning() for salt in (b"a", b"b")]
    assert len({*salted, a_query(a_request()).beginning()}) == 3, "other tenants' prompts are other prompts"
    assert a_query(a_request(15)).beginning() == b"", "it fills no block"


def test_an_overloaded_replica_is_passed_on_the_ring() -> None:
    model, policy = a_model(profiles("4*A10")), create_routing_policy("prefix_affinity")
    query = a_query(a_request())
    home = policy.order(query, model.candidates(0.0, query))[0]
    model.sent(0.0, home, 200, sequences=3)
    assert policy.order(query, model.candidates(0.0, query))[0] != home
    model.set_usable(home, usable=False)
    assert home not in policy.order(query, model.candidates(0.0, query))
    model.remove(home)
    assert home not in policy.order(query, model.candidates(0.0, query))


def test_others_than_motleys_are_not_bound_to_what_motley_finds_best() -> None:
    every = profiles("20*P40+20*H100 80GB HBM3")
    model, query = a_model(every), RoutingQuery(500)
    replicas = model.candidates(0.0, query)
    own = create_routing_policy(DEFAULT_POLICY).order(query, replicas)
    assert len(own) == RANKS
    assert min(own) >= 20
    for name in set(PUBLIC) - {DEFAULT_POLICY}:
        assert sorted(create_routing_policy(name).order(query, replicas)) == list(range(40)), name


class CountedOrder(PredictedLatency):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.calls = Counter[str]()

    def order(self, query: RoutingQuery, replicas: RoutingCandidates) -> Sequence[int]:
        self.calls["order"] += 1
        return super().order(query, replicas)

    def sent(self, query: RoutingQuery, replica: int) -> None:
        self.calls["sent"] += 1

    def ended(self, query: RoutingQuery, replica: int) -> None:
        self.calls["ended"] += 1


async def a_visit(live: ReplicaDirectory, request: Request) -> AsyncGenerator[str, None]:
    visit = live.dispatch([request])
    for name in visit.order:
        visit.to(name)
        yield name
    visit.end()


def a_directory(count: int = 3) -> ReplicaDirectory:
    live = ReplicaDirectory({"pool": "pool"}, SLO, random.Random(0), clock=lambda: 1.0)
    for profile in profiles(f"{count}*A10"):
        live.joined(profile)
    for member in live.replicas.values():
        member.observed = PROVEN
    return live


async def test_an_ingress_asks_its_policy_once_for_a_request_and_tells_it_where_that_went() -> None:
    live = a_directory()
    live.policy = policy = CountedOrder(random.Random(0))
    request = replace(a_request(), deadline_s=30.0)
    assert live.soonest(request) is not None
    assert live.has_capacity(request, allow_late=False)
    tried = [name async for name in a_visit(live, request)]
    assert sorted(tried) == sorted(live.replicas)
    assert policy.calls == {"order": 1, "sent": 3, "ended": 3}


async def test_what_was_sent_ends_with_the_policy_that_it_was_sent_by() -> None:
    live = a_directory()
    live.policy = first = CountedOrder(random.Random(0))
    visit = live.dispatch([a_request()])
    visit.to(visit.best or "")
    live.replace_policy("round_robin")
    live.policy = second = CountedOrder(random.Random(0))
    live.left(visit.best or "")
    visit.end()
    assert first.calls == {"order": 1, "sent": 1, "ended": 1}
    assert second.calls == {}


@pytest.mark.parametrize("name", PUBLIC)
async def test_every_policy_serves_in_an_ingress(name: str) -> None:
    live = a_directory(4)
    live.replace_policy(name)
    policy = live.policy
    live.replace_policy(name)
    assert live.policy is policy, "its state is kept"
    assert isinstance(policy, ROUTING_POLICIES[name])
    going = []
    for number in range(12):
        visit = live.dispatch([a_request(first=number + 1)])
        assert sorted(visit.order) == sorted(live.replicas)
        visit.to(visit.best or "")
        going.append(visit)
    assert live.directory.own_share() == 1.0
    for visit in going:
        visit.end()
    assert not live.directory._carried.any()


@pytest.mark.parametrize("name", PUBLIC)
def test_a_fleet_file_names_the_policy(name: str) -> None:
    spec = FleetSpec.model_validate({"model": "demo", "pools": [{"name": "a"}], "routing": {"policy": name}})
    assert fleet_routing_config(spec).policy == name
    plain = FleetSpec.model_validate({"model": "demo", "pools": [{"name": "a"}]})
    assert fleet_routing_config(plain).policy == DEFAULT_POLICY
    changes = [(each.kind, str(each)) for each in list_changes(plain, spec)]
    assert changes == ([] if name == DEFAULT_POLICY else [("live", f"routing.policy {DEFAULT_POLICY} -> {name}")])
    told = fleet_schema()["$defs"]["RoutingSpec"]["properties"]["policy"]
    assert name in told["enum"]
    assert f"{name}: " in told["description"]


def test_an_unknown_policy_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("model: demo\npools: [{name: a}]\nrouting: {policy: fastest}\n")
    with pytest.raises(ConfigurationError, match=r"3.*'fastest' is not known; expected one of .*two_choices"):
        load_fleet(path)
    with pytest.raises(InvalidRequest, match="'fastest' is not known"):
        create_routing_policy("fastest")
    assert issubclass(ROUTING_POLICIES[DEFAULT_POLICY], RoutingPolicy)
