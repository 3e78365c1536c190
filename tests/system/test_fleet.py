"""A fleet of four simulated pools of unequal speed and a real one: all that happens to fleets, one after the other.

Lost, drained and scaled under load, by a control plane whose actor is killed; rolled, watched by KEDA, and given
another file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import serve_api
import yaml
from control_client import Plane
from load_run import load
from serve_process import Served, command_line, served, wait_for

from motley.client import Client
from motley.cluster.fleet.control.control_contact import ControlContact, find_contacts
from motley.cluster.protos import control_pb2 as pb
from motley.cluster.protos import externalscaler_pb2 as keda_pb
from motley.cluster.protos import externalscaler_pb2_grpc as keda_grpc
from motley.cluster.protos import inference_pb2

CLIENTS = 10
GPUS = {"p40": "P40", "t4": "T4", "a10": "A10", "h100": "H100"}
POOLS = (*GPUS, "cpu")
TOKENS = 600  # of a stream that outlasts what happens meanwhile


def simulated(gpu: str, maximum: int = 1, seed: int = 0) -> dict[str, Any]:
    """Two at a time, that the fastest is not the soonest for all."""
    like = {"simulate_model": "qwen2.5-7b", "hidden": {"seed": seed}, "engine": {"max_running": 2}}
    return {"simulate": gpu, "replicas": {"min": 0, "max": maximum, "start": 1}, **like}


def said(checkpoint: Path, **pools: dict[str, Any]) -> dict[str, Any]:
    slo = {"ttft_ms": 5000, "tpot_ms": 500}
    return {"model": str(checkpoint), "slo": slo, "pools": [{"name": name, **pool} for name, pool in pools.items()]}


@pytest.fixture(scope="module")
def first(checkpoint: Path) -> dict[str, Any]:
    """Return what the file says when the fleet starts."""
    pools = {name: simulated(gpu, 3 if name == "a10" else 1, seed) for seed, (name, gpu) in enumerate(GPUS.items())}
    # One at a time: this model is small enough for a CPU to outrun them all.
    engine = {"threads": 1, "max_running": 1, "max_waiting": 1, "kv_memory": "64MiB"}
    return said(checkpoint, **pools, cpu={"engine": engine, "replicas": {"min": 0, "max": 1, "start": 1}})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet") / "fleet.yaml"


@pytest.fixture(scope="module")
def fleet(path: Path, first: dict[str, Any]) -> Iterator[Served]:
    path.write_text(yaml.safe_dump(first, sort_keys=False))
    with served([str(path)], path.parent) as service:
        service.wait_ready()
        yield service


@pytest.fixture(scope="module")
def contact(fleet: Served) -> ControlContact:
    [found] = [one for one in find_contacts() if one.address == fleet.endpoints["admin"]]
    return found


@pytest.fixture(scope="module")
def plane(contact: ControlContact) -> Plane:
    return Plane(contact)


def kill_the_actor(service: Served) -> int:
    [pid] = [pid for pid in service.descendants() if "ControlActor" in command_line(pid)]
    os.kill(pid, signal.SIGKILL)
    return pid


def test_killed_drained_and_scaled_under_load(fleet: Served, plane: Plane) -> None:
    """No request is lost, none is answered twice, each ends once; every pool had its part.

    Each decision is made once, whatever becomes of the actor.
    """
    worked = set[str]()

    def all_worked() -> bool:
        worked.update(pool.name for pool in plane.fleet.pools for one in pool.replicas if one.running)
        return worked == set(POOLS)

    for name in POOLS:
        plane.wait(1, name)
    start = plane.fleet
    after = start.events[-1].sequence
    with load(fleet, CLIENTS) as running:
        wait_for(all_worked, "work for every pool", 120)
        [killed] = plane.pool_of("t4").replicas
        os.kill(killed.pid, signal.SIGKILL)
        made = plane.scale(3, "a10", generation=start.generation)
        assert made.generation == start.generation + 1
        old = kill_the_actor(fleet)  # Serve may have been told, or not
        [drained] = plane.pool_of("p40").replicas
        plane.call("DrainReplica", pb.DrainReplicaRequest(replica_id=drained.replica_id, timeout_s=20, reason="why"))
        plane.wait(3, "a10")
        assert plane.fleet.generation == made.generation + 1, "the drain's"
        with pytest.raises(grpc.RpcError) as caught:
            plane.scale(2, "a10", generation=start.generation)
        assert caught.value.code() == grpc.StatusCode.ABORTED
        plane.scale(0, "a10")
        assert kill_the_actor(fleet) != old
        plane.wait(0, "a10")
        plane.scale(1, "a10")
        for name in POOLS:
            plane.wait(1, name)
        assert plane.pool_of("t4").replicas[0].replica_id != killed.replica_id
        assert plane.pool_of("p40").replicas[0].replica_id != drained.replica_id
        done = len(running.ends)
        wait_for(lambda: len(running.ends) > done + CLIENTS, "answers")
    now = plane.fleet
    assert (now.demand.requests, now.demand.refused) == (len(running.ends), 0)
    assert now.generation == start.generation + 4
    assert plane.kinds(after)["EVENT_KIND_SCALED"] == 3
    reported = [(one.before, one.after) for one in now.events if one.sequence > after and one.reason.startswith("to ")]
    assert reported == [(1, 3), (3, 0), (0, 1)]


def test_where_there_is_nobody_requests_wait(fleet: Served, plane: Plane) -> None:
    """From here on there is one pool that serves."""
    for name in POOLS:
        plane.scale(0, name)
    for name in POOLS:
        plane.wait(0, name)
    with load(fleet, CLIENTS) as running:
        wait_for(lambda: len(running.ends) == CLIENTS, "as many requests")
        waiting = Counter(len(ends) for ends in list(running.ends.values()))[0]
        assert waiting == CLIENTS, "nobody is there to end them"
        plane.scale(1, "a10")
        plane.wait(1, "a10")
        wait_for(lambda: len(running.ends) > 2 * CLIENTS, "answers")


@pytest.mark.thorough
def test_one_that_is_drained_is_replaced_and_one_that_is_removed_is_not(fleet: Served, plane: Plane) -> None:
    plane.scale(2, "a10")
    plane.wait(2, "a10")
    first, second = (one.replica_id for one in plane.pool_of("a10").replicas)

    def there() -> set[str]:
        return {one.replica_id for one in plane.pool_of("a10").replicas}

    with load(fleet, CLIENTS):
        plane.call("DrainReplica", pb.DrainReplicaRequest(replica_id=first, timeout_s=5, reason="its fan"))
        wait_for(lambda: first not in there(), "its end", 120)
        plane.wait(2, "a10")
        assert second in there()
        plane.call("DrainReplica", pb.DrainReplicaRequest(replica_id=second, remove=True, timeout_s=5, reason="why"))
        plane.wait(1, "a10")
        assert second not in there()
        assert plane.pool_of("a10").target == 1


def test_a_roll_under_load_and_a_bad_one(fleet: Served, plane: Plane, tmp_path: Path) -> None:
    plane.wait(1, "a10")
    [before] = [one.replica_id for one in plane.pool_of("a10").replicas]
    with load(fleet, CLIENTS):
        plane.call("RollModel", pb.RollModelRequest(pool="a10", reason="why"))
        wait_for(lambda: before not in {one.replica_id for one in plane.pool_of("a10").replicas}, "its end", 120)
        plane.wait(1, "a10")
        with pytest.raises(grpc.RpcError) as caught:
            plane.call("RollModel", pb.RollModelRequest(pool="a10", model=str(tmp_path), reason="why"))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert plane.fleet.events[-1].kind in (pb.EVENT_KIND_ROLLED, pb.EVENT_KIND_SETTLED)


@pytest.mark.thorough
def test_policies_follow_the_load_up_and_down_to_nothing_and_back(fleet: Served, plane: Plane) -> None:
    """Each decision with its author and its reason, as WatchFleet tells it."""
    for name in POOLS:
        plane.scale(int(name == "a10"), name)
    for name in POOLS:
        plane.wait(int(name == "a10"), name)
    after = plane.fleet.events[-1].sequence
    plane.policy("queue", running=1, settle_s=1)
    with load(fleet, CLIENTS):
        plane.wait(3, "a10")
    plane.wait(1, "a10")
    plane.policy("slo", idle_s=1)
    plane.wait(0, "a10")
    assert health(fleet)["state"] == "holding", "ready: what comes wakes a replica"
    with Client(fleet.grpc, retries=0, timeout_s=100) as client:
        held = client.complete("Once", max_tokens=3, ignore_eos=True)
    assert len(held.choices[0].token_ids) == 3
    plane.policy("fixed")
    reported = [
        (one.by, one.pool, one.after, one.reason)
        for one in next(plane.watch(after)).events
        if one.kind == pb.EVENT_KIND_SCALED
    ]
    # Where the load ends slowly, two are wanted on the way from three to one.
    reported = [one for one in reported if one[2] != 2]
    assert [(by, to) for by, _, to, _ in reported[:4]] == [
        ("policy queue", 3), ("policy queue", 1), ("policy slo", 0), ("policy slo", 1),
    ]  # fmt: skip
    reasons = ("sequences", "no more than 1 wanted", "no request for 1 s", "1 held")
    for (_, _, _, reason), expected in zip(reported, reasons, strict=False):
        assert expected in reason
    for name in POOLS:
        plane.scale(int(name == "a10"), name)
    for name in POOLS:
        plane.wait(int(name == "a10"), name)


@pytest.mark.thorough
def test_an_ingress_that_is_lost_at_zero_comes_back_and_wakes_a_replica(fleet: Served, plane: Plane) -> None:
    for name in POOLS:
        plane.scale(0, name)
    for name in POOLS:
        plane.wait(0, name)
    plane.policy("queue", settle_s=1)
    [lost] = [pid for pid in fleet.replicas() if ":ingress" in command_line(pid)]
    os.kill(lost, signal.SIGKILL)
    wait_for(lambda: lost not in fleet.replicas(), "its end", 60)
    with Client(fleet.grpc, retries=20, timeout_s=100) as client:
        assert len(client.complete("Once", max_tokens=3, ignore_eos=True).choices[0].token_ids) == 3
    assert health(fleet)["state"] == "serving"
    plane.policy("fixed")
    for name in POOLS:
        plane.scale(int(name == "a10"), name)
    for name in POOLS:
        plane.wait(int(name == "a10"), name)


def health(fleet: Served) -> dict[str, Any]:
    with urllib.request.urlopen(f"{fleet.http}/health", timeout=30) as response:
        return dict(json.load(response))


def test_keda(plane: Plane, contact: ControlContact) -> None:
    keda = keda_grpc.ExternalScalerStub(plane.channel)
    ref = keda_pb.ScaledObjectRef(
        name="workers", namespace="default", scalerMetadata={"pool": "a10", "target": "2", "keyFromEnv": contact.key}
    )
    assert keda.IsActive(ref, timeout=20).result is True
    [spec] = keda.GetMetricSpec(ref, timeout=20).metricSpecs
    request = keda_pb.GetMetricsRequest(scaledObjectRef=ref, metricName=spec.metricName)
    [value] = keda.GetMetrics(request, timeout=20).metricValues
    assert (spec.targetSizeFloat, value.metricValueFloat) == (2.0, 1.0)
    stream = keda.StreamIsActive(ref, timeout=120)
    assert next(stream).result is True
    plane.scale(0, "a10")
    assert next(stream).result is False
    stream.cancel()
    plane.scale(2, "a10")
    plane.wait(2, "a10")


def test_motley_fleet(fleet: Served, plane: Plane, contact: ControlContact, tmp_path: Path) -> None:
    """On this machine the key is found; elsewhere it is given."""
    for name in POOLS:  # whatever was tested before
        plane.scale(2 if name == "a10" else 0, name)

    def run(*arguments: str, status: int = 0, **more: str) -> str:
        command = [sys.executable, "-m", "motley", "fleet", *arguments, "--address", contact.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **more})
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    shown = json.loads(run("status", "--json"))
    assert [pool["name"] for pool in shown["pools"]] == sorted(POOLS)
    assert all(name in run("status") for name in POOLS)
    assert "it was so already" in run("scale", "a10", "2")
    assert "allow_zero" in run("scale", "a10", "0", status=1)
    assert "from 0 to 3" in run("scale", "a10", "4", status=2)
    assert f"there are: {', '.join(sorted(POOLS))}" in run("metrics", "gpu", status=2)
    bounds = {name: [0, 3 if name == "a10" else 1] for name in POOLS}
    assert json.loads(run("policy", "--json")) == {"policy": "fixed", "bounds": bounds}
    assert "a valid API key of an admin is required" in run("status", status=1, MOTLEY_ADMIN_KEY="mk-wrong")
    (tmp_path / "key").write_text(f"{contact.key}\n")
    assert run("metrics", "--admin-key", str(tmp_path / "key"))


def apply(service: Served, path: Path, said: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    path.write_text(yaml.safe_dump(said, sort_keys=False))
    ports = ["--http-port", str(service.http_port), "--grpc-port", str(service.grpc_port)]
    command = [sys.executable, "-m", "motley", "serve", str(path), *ports]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def stream(service: Served, begun: threading.Event) -> tuple[int, list[int]]:
    """Tokens, and how its choices ended."""
    count, ends = 0, []
    with Client(service.grpc, retries=0) as client:
        for chunk in client.stream("Once", max_tokens=TOKENS, ignore_eos=True):
            for choice in chunk.choices:
                count += len(choice.token_ids)
                ends += [choice.finish_reason] if choice.finish_reason else []
                begun.set()
    return count, ends


def test_what_has_changed_in_the_file_is_applied_and_nothing_is_lost(
    fleet: Served, plane: Plane, path: Path, first: dict[str, Any], checkpoint: Path
) -> None:
    plane.wait(2, "a10")
    before, begun = serve_api.replicas(fleet, "a10"), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        streamed = threads.submit(stream, fleet, begun)
        assert begun.wait(60)

        pools = {pool["name"]: {key: pool[key] for key in pool if key != "name"} for pool in first["pools"]}
        pools["a10"], l4 = simulated("A10", 5, seed=2), simulated("L4")
        applied = apply(fleet, path, said(checkpoint, **pools, l4=l4))
        assert applied.returncode == 0, applied.stderr
        assert applied.stdout.splitlines() == [
            "pool a10: replicas.max 3 -> 5",
            "pool l4: added, target 1",
            "applied; no replica is replaced",
        ]
        wait_for(lambda: len(serve_api.replicas(fleet, "l4")) == 1, "the new pool")
        targets = {name: pool["target_num_replicas"] for name, pool in serve_api.pools(fleet).items()}
        assert targets == {**dict.fromkeys(POOLS, 0), "a10": 2, "l4": 1}, "kept, though the file says start 1"

        refused = apply(fleet, path, {**said(checkpoint, **pools), "served_model_name": "other"})
        assert refused.returncode == 1
        assert f"{path}:" in refused.stderr
        assert f"served_model_name: other is not what runs ({fleet.endpoints['model']})" in refused.stderr
        refused = apply(fleet, path, said(checkpoint, new=simulated("T4")))
        assert refused.returncode == 1
        assert "none of the pools that serve would stay" in refused.stderr
        assert set(serve_api.pools(fleet)) == {*POOLS, "l4"}, "nothing of what was refused was done"

        applied = apply(fleet, path, said(checkpoint, a10={**pools["a10"], "replicas": 1}, l4=l4))
        assert applied.returncode == 0, applied.stderr
        assert "pool a10: target 2 -> 1, within its bounds" in applied.stdout
        assert "pool t4: removed" in applied.stdout
        assert streamed.result(120) == (TOKENS, [inference_pb2.FINISH_REASON_LENGTH])
    wait_for(lambda: set(serve_api.pools(fleet)) == {"a10", "l4"}, "the pools to be gone")
    wait_for(lambda: len(serve_api.replicas(fleet, "a10")) == 1, "one replica to be left")
    assert serve_api.replicas(fleet, "a10") < before, "it is one of the first"
    repeated = apply(fleet, path, yaml.safe_load(path.read_text()))
    assert (repeated.returncode, repeated.stdout) == (0, "nothing has changed\n")
    with Client(fleet.grpc, retries=0) as client:
        assert len(client.complete("Once", max_tokens=3, ignore_eos=True).choices[0].token_ids) == 3
