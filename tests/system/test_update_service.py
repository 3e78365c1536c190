"""Weights that change under live streams of a real service."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from new_weights import changed, tensors_of, written
from served import Served, served, wait_for

from motley import Engine, SamplingParams
from motley.cli.fleet_calls import Calls, reached
from motley.client import Client
from motley.cluster.protos import control_pb2 as pb

STREAMS, TOKENS = 6, 4_000


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def fleet(checkpoint: Path, roots: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two replicas, and room for a third."""
    arguments = [str(checkpoint), "--served-model-name", "tiny", "--threads", "1", "--kv-memory", "64MiB"]
    arguments += ["--dtype", "float32", "--replicas", "2", "--max-replicas", "3", "--weights-root", str(roots)]
    arguments += ["--frozen-weights", "model.embed_tokens.*"]
    with served(arguments, tmp_path_factory.mktemp("updated")) as service:
        service.wait_ready()
        yield service


def motley(service: Served, *arguments: str) -> tuple[int, str, str]:
    """`motley fleet ...` of that service: its status, stdout and stderr."""
    command = [sys.executable, "-m", "motley", "fleet", *arguments, "--address", service.endpoints["admin"]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return ended.returncode, ended.stdout, ended.stderr


def text(service: Served, number: int, tokens: int, begun: threading.Event | None = None) -> list[int]:
    ids: list[int] = []
    with Client(service.grpc, retries=0) as client:
        for chunk in client.stream(f"Once {number}", max_tokens=tokens, ignore_eos=True, temperature=0.0):
            for choice in chunk.choices:
                ids += choice.token_ids
            if begun is not None and ids:
                begun.set()
    return ids


def expected(folder: Path, number: int, tokens: int) -> list[int]:
    with Engine(folder, dtype="float32", threads=1, kv_memory_bytes=1 << 26) as engine:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, seed=0)
        return engine.generate(f"Once {number}", params)[0].token_ids


def fingerprint(service: Served) -> str:
    """Of an answer over HTTP."""
    body = json.dumps({"model": "tiny", "prompt": "Once", "max_tokens": 2}).encode()
    asked = urllib.request.Request(f"{service.http}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return str(json.load(answer)["system_fingerprint"])


def versions(service: Served) -> list[int]:
    [pool] = json.loads(motley(service, "status", "--json")[1])["pools"]
    return [int(one.get("weights_version", 0)) for one in pool["replicas"]]


def test_weights_change_under_streams(fleet: Served, checkpoint: Path, roots: Path, tmp_path: Path) -> None:
    """No stream is lost, and each is wholly of one model; new ones are of the new weights, on every replica."""
    old = tensors_of(checkpoint)
    generator = torch.Generator().manual_seed(1)
    new: dict[str, Any] = {
        name: torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * tensor.float().std().to(tensor.dtype)
        for name, tensor in old.items()
        if ".mlp." in name
    }
    file = written(roots / "step-1.safetensors", new)
    after = changed(checkpoint, new, tmp_path / "changed")
    frozen = written(roots / "frozen.safetensors", {name: old[name] for name in old if "embed_tokens" in name})
    elsewhere = written(tmp_path / "elsewhere.safetensors", new)
    assert "-" not in fingerprint(fleet)
    begun = [threading.Event() for _ in range(STREAMS)]
    contact = reached(fleet.endpoints["admin"], "", None)
    with ThreadPoolExecutor(STREAMS) as threads, Calls(contact, None, 120.0) as plane:
        futures = [threads.submit(text, fleet, number, TOKENS, begun[number]) for number in range(STREAMS)]
        assert all(each.wait(60) for each in begun)
        for wrong, code in ((frozen, grpc.StatusCode.INVALID_ARGUMENT), (elsewhere, grpc.StatusCode.PERMISSION_DENIED)):
            with pytest.raises(grpc.RpcError) as refused:
                plane.UpdateWeights(pb.UpdateWeightsRequest(path=str(wrong)))
            assert refused.value.code() == code, refused.value.details()
        made = plane.UpdateWeights(pb.UpdateWeightsRequest(path=str(file), expected_version=0))
        assert [(one.weights_version, one.error) for one in made.replicas] == [(1, "")] * 2
        assert not any(future.done() for future in futures), "they live: make them longer"
        answers = [future.result(180) for future in futures]
    assert answers[0] == expected(checkpoint, 0, TOKENS)
    assert [len(answer) for answer in answers] == [TOKENS] * STREAMS
    with ThreadPoolExecutor(STREAMS) as threads:
        for found, right in zip(
            threads.map(lambda number: text(fleet, number, 32), range(STREAMS)),
            [expected(after, number, 32) for number in range(STREAMS)],
            strict=True,
        ):
            assert found == right
    assert fingerprint(fleet).endswith("-1")
    with Client(fleet.grpc) as client:
        told = client.complete("Once", max_tokens=2).weights
    assert [(one.version, one.contents) for one in told] == [(1, made.contents)]
    status, _, words = motley(fleet, "update", str(file), "--expect-version", "0")
    assert (status != 0, "version 1 by now" in words) == (True, True), words
    status, told, words = motley(fleet, "update", str(file), "--expect-version", "1")
    assert (status, "cpu: weights of version 2" in told) == (0, True), told + words
    status, _, words = motley(fleet, "scale", "cpu", "3", "--wait")
    assert status == 0, words
    wait_for(lambda: versions(fleet) == [2, 2, 2], "a replica that came later to have the same weights", 60)
    with ThreadPoolExecutor(STREAMS) as threads:
        assert len({tuple(one) for one in threads.map(lambda _: text(fleet, 0, 32), range(STREAMS))}) == 1


def told(service: Served, number: int, begun: threading.Event) -> tuple[int, list[str]]:
    """How many tokens an answer has, and of which weights it says that it is."""
    tokens, weights = 0, []
    with Client(service.grpc, retries=0) as client:
        for chunk in client.stream(f"Once {number}", max_tokens=TOKENS, ignore_eos=True, temperature=0.0):
            weights += [chunk.weights.contents] if chunk.HasField("weights") else []
            tokens += sum(len(choice.token_ids) for choice in chunk.choices)
            if tokens:
                begun.set()
    return tokens, weights


def test_a_stream_that_moves_after_an_update_says_so(fleet: Served, checkpoint: Path, roots: Path) -> None:
    """Its replica goes, and nobody has the weights that it began with any more; streams of others are of one model."""
    new = {name: tensor.flip(0) for name, tensor in tensors_of(checkpoint).items() if ".mlp." in name}
    file = written(roots / "flipped.safetensors", new)
    begun = [threading.Event() for _ in range(STREAMS)]
    with (
        ThreadPoolExecutor(STREAMS) as threads,
        Calls(reached(fleet.endpoints["admin"], "", None), None, 120.0) as plane,
        Client(fleet.grpc) as client,
    ):
        [old] = client.complete("Once", max_tokens=2).weights
        futures = [threads.submit(told, fleet, number, begun[number]) for number in range(STREAMS)]
        assert all(each.wait(60) for each in begun)
        made = plane.UpdateWeights(pb.UpdateWeightsRequest(path=str(file)))
        assert not any(one.error for one in made.replicas)
        [pool] = plane.GetFleet(pb.GetFleetRequest()).pools
        busiest = max(pool.replicas, key=lambda one: one.running)
        plane.DrainReplica(pb.DrainReplicaRequest(replica_id=busiest.replica_id, timeout_s=0.1))
        assert not any(future.done() for future in futures), "they live: make them longer"
        answers = [future.result(180) for future in futures]
    assert [tokens for tokens, _ in answers] == [TOKENS] * STREAMS
    moved = [weights for _, weights in answers if len(weights) > 1]
    assert moved == [[old.contents, made.contents]] * len(moved) != []
    assert [weights for _, weights in answers if len(weights) == 1] == [[old.contents]] * (STREAMS - len(moved))
