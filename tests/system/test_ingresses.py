"""Two ingresses before one fleet, and two tenants: what concerns all reaches both, and nobody is crowded out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from control_client import Plane
from metrics_scraper import Scrape, Scraper, growth, scrape, total
from serve_process import Served, command_line, served, wait_for
from thorough import thorough

from motley.client import Client
from motley.cluster.fleet.control.control_contact import find_contacts
from motley.cluster.protos import control_pb2 as pb
from motley.cluster.security.auth.api_keys import StoredKey, hash_key, new_key
from motley.cluster.security.auth.key_file import edit_keys

ALICE, BOB, SCRAPER = new_key(), new_key(), new_key()
RUNNING = 2  # sequences on each of two replicas
FLOOD = 24
WAITING = 14  # of them, in the queue of all, where the other tenant's request passes them
STREAMS = 8
LONG = 120  # tokens of each of these: few begin while a busy machine takes up the other's request


def said(checkpoint: Path, keys: Path, *pools: str) -> dict[str, Any]:
    engine = {"max_running": RUNNING, "max_waiting": RUNNING}
    like = {"simulate_model": "qwen2.5-7b", "hidden": {"share": 0.0}, "engine": engine}
    return {
        "model": str(checkpoint),
        "pools": [{"name": gpu.lower(), "simulate": gpu, "replicas": {"max": 2}, **like} for gpu in pools],
        "queue": {"max_wait_s": 300},
        "tenants": {"bob": {"weight": 2}},
        "security": {"api_keys": str(keys)},
        "service": {"ingresses": 2},
    }


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    with edit_keys(path) as stored:
        stored += [StoredKey("alice", hash_key(ALICE)), StoredKey("bob", hash_key(BOB))]
        stored += [StoredKey("prometheus", hash_key(SCRAPER), scope="metrics")]
    return path


@pytest.fixture(scope="module")
def path(checkpoint: Path, keys: Path) -> Path:
    path = keys.parent / "fleet.yaml"
    path.write_text(yaml.safe_dump(said(checkpoint, keys, "P40", "T4")))
    return path


@pytest.fixture(scope="module")
def service(path: Path) -> Iterator[Served]:
    with served([str(path)], path.parent) as service:
        service.wait_ready()
        yield service


@pytest.fixture(scope="module")
def plane(service: Served) -> Plane:
    [contact] = [one for one in find_contacts() if one.address == service.endpoints["admin"]]
    return Plane(contact)


def ingresses(service: Served) -> list[int]:
    return [pid for pid in service.descendants() if "ServeReplica:motley:ingress" in command_line(pid)]


def settled(service: Served, plane: Plane) -> Scrape | None:
    """Return what is told once all requests have ended there: each ingress records its counts a second later."""
    found = scrape(service.http, SCRAPER)
    totals = {total(found, f"motley_{name}_total") for name in ("requests", "request_success")}
    return found if totals == {plane.fleet.demand.requests} else None


def connected(service: Served, key: str) -> Client:
    return Client(service.grpc, api_key=key, retries=0, timeout_s=170)


def send(service: Served, key: str, name: str, begun: list[str], tokens: int = 40) -> int:
    """Tokens, over a connection of its own."""
    with connected(service, key) as client:
        return send_over(client, name, begun, tokens)


def send_over(client: Client, name: str, begun: list[str], tokens: int = 40) -> int:
    """Tokens; `begun` has its name from the first of them on."""
    count = 0
    for chunk in client.stream(f"Once {name}", max_tokens=tokens, ignore_eos=True, request_id=f"of-{name}"):
        if chunk.choices and not count:
            begun.append(name)
        count += sum(len(choice.token_ids) for choice in chunk.choices)
    return count


def test_one_tenant_floods_and_the_other_is_served(service: Served, plane: Plane) -> None:
    """By how many begin before it, all of which came earlier: the clock says nothing on a busy machine.

    Without tenants it would be the last, or as good as that where the last few begin together. With them it comes
    after those that have left the queue, and after the few that leave it while a busy machine takes its request up.
    """
    assert len(ingresses(service)) == 2
    begun: list[str] = []
    with ThreadPoolExecutor(FLOOD) as threads, connected(service, BOB) as bob:
        assert bob.models()  # what a busy machine takes for a connection is no time of Bob's in the queue
        flood = [threads.submit(send, service, ALICE, f"alice {number}", begun, LONG) for number in range(FLOOD)]
        wait_for(lambda: plane.fleet.demand.held >= WAITING, "requests that wait")
        assert send_over(bob, "bob", begun) == 40
        assert [one.result(120) for one in flood] == [LONG] * FLOOD
    earlier = begun.index("bob")
    assert earlier <= FLOOD - 4 * RUNNING, f"{earlier} of {FLOOD} that came before began first"
    wait_for(lambda: plane.fleet.demand.output_tokens == LONG * FLOOD + 40, "what both ingresses have counted")
    demand = plane.fleet.demand
    assert (demand.requests, demand.refused, demand.held) == (FLOOD + 1, 0, 0)


@pytest.mark.parametrize("scrapes", [20, *thorough(200)])
def test_no_count_falls_when_a_replica_or_an_ingress_is_killed(service: Served, plane: Plane, scrapes: int) -> None:
    """Under load, and whichever of the two tells: the sums are what clients were sent, each token once."""
    before = wait_for(lambda: settled(service, plane), "what earlier tests have left to be counted by both")
    with Scraper(service.http, SCRAPER) as scraper, ThreadPoolExecutor(STREAMS) as threads:
        begun: list[str] = []
        streams = [threads.submit(send, service, (ALICE, BOB)[i % 2], f"{i:02}", begun, LONG) for i in range(STREAMS)]
        wait_for(lambda: len(begun) >= RUNNING, "streams that run")
        [victim] = [pid for pid in service.descendants() if "ServeReplica:motley:t4" in command_line(pid)]
        os.kill(victim, signal.SIGKILL)
        tokens = sum(one.result(170) for one in streams)
        expected = {
            "motley_requests_total": STREAMS,
            "motley_generation_tokens_total": tokens,
            "motley_prompt_tokens_total": STREAMS * len("Once 00"),
            "motley_request_success_total": STREAMS,
            "motley_e2e_request_latency_seconds_count": STREAMS,
            "motley_request_generation_tokens_sum": tokens,
        }
        wait_for(lambda: growth(before, scraper.last, expected) == expected, "the sums")
        wait_for(lambda: scraper.scrapes >= scrapes, "scrapes", 300)
        [first, _] = ingresses(service)
        os.kill(first, signal.SIGKILL)
        since = scraper.scrapes
        wait_for(lambda: len(ingresses(service)) == 2, "another ingress", 120)
        wait_for(lambda: scraper.scrapes >= since + scrapes, "scrapes", 300)
        assert growth(before, scraper.last, expected) == expected
        running = ("motley_num_requests_running", "motley_num_requests_waiting", "motley_num_requests_held")
        wait_for(lambda: not any(total(scraper.last, name) for name in running), "nothing to run or wait")
    assert not scraper.fallen


def test_a_drained_replica_gets_nothing_from_either(service: Served, plane: Plane) -> None:
    """Whichever of both has placed a request explains it."""
    plane.call("ScalePool", pb.ScalePoolRequest(pool="t4", replicas=2, reason="why"))
    wait_for(lambda: plane.pool_of("t4").ready == 2, "another replica")
    drained, left = (one.replica_id for one in plane.pool_of("t4").replicas)
    plane.call("DrainReplica", pb.DrainReplicaRequest(replica_id=drained, remove=True, reason="why"))
    with ThreadPoolExecutor(8) as threads:
        requested = [threads.submit(send, service, BOB, f"drained-{number % 2}", []) for number in range(16)]
        assert [one.result(120) for one in requested] == [40] * 16
    found = [plane.call("ExplainRoute", pb.ExplainRouteRequest(request=f"of-drained-{number}")) for number in range(2)]
    routes = [route for one in found for route in one.routes]
    assert ([one.matches for one in found], len({one.ingress for one in routes})) == ([8, 8], 2)
    assert {(one.outcome, one.output_tokens, one.tenant) for one in routes} == {("answered", 40, "bob")}
    assert all(one.choice.startswith("It went to ") and one.cause for one in routes)
    wait_for(lambda: [one.replica_id for one in plane.pool_of("t4").replicas] == [left], "its end")


def test_a_pool_that_the_file_has_no_more_is_left_by_both(
    service: Served, plane: Plane, path: Path, checkpoint: Path, keys: Path
) -> None:
    before = plane.fleet.demand.requests
    path.write_text(yaml.safe_dump(said(checkpoint, keys, "T4")))
    ports = ["--http-port", str(service.http_port), "--grpc-port", str(service.grpc_port)]
    command = [sys.executable, "-m", "motley", "serve", str(path), *ports]
    with ThreadPoolExecutor(8) as threads:
        requested = [threads.submit(send, service, ALICE, f"{number}", [], 60) for number in range(16)]
        applied = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert applied.returncode == 0, applied.stderr
        assert "pool p40: removed" in applied.stdout
        requested += [threads.submit(send, service, ALICE, f"after {number}", []) for number in range(16)]
        assert [one.result(120) for one in requested] == [60] * 16 + [40] * 16
    wait_for(lambda: [pool.name for pool in plane.fleet.pools] == ["t4"], "the pool to be gone")
    wait_for(lambda: plane.fleet.demand.requests == before + 32, "what both ingresses have counted")
