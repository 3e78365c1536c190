"""Weights that change under live streams of a real service."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from new_weights import changed, tensors_of, written
from serve_process import Served, served, wait_for

from motley import Engine, SamplingParams
from motley.cli.fleet_calls import ControlPlaneClient, resolve_contact
from motley.client import Client
from motley.cluster.protos import control_pb2 as pb

STREAMS = 6
ENDLESS = 60_000  # of the 65,536 that a context has


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def fleet(checkpoint: Path, roots: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two replicas, and room for a third. When it has ended nothing of the weights that they had is left."""
    arguments = [str(checkpoint), "--served-model-name", "tiny", "--threads", "1", "--kv-memory", "64MiB"]
    arguments += ["--dtype", "float32", "--replicas", "2", "--max-replicas", "3", "--weights-root", str(roots)]
    arguments += ["--frozen-weights", "model.embed_tokens.*"]
    temporary = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        with served(arguments, tmp_path_factory.mktemp("updated")) as service:
            service.wait_ready()
            yield service
            assert list(temporary.glob("motley-weights-*/*.safetensors")), "there was something"
    assert not list(temporary.glob("motley-weights-*"))


def motley(service: Served, *arguments: str) -> tuple[int, str, str]:
    """`motley fleet ...` of that service: its status, stdout and stderr."""
    command = [sys.executable, "-m", "motley", "fleet", *arguments, "--address", service.endpoints["admin"]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return ended.returncode, ended.stdout, ended.stderr


@dataclass
class Stream:
    """One that ends when its reader has enough: how long what happens meanwhile takes is not known."""

    number: int
    ids: list[int] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)  # of which it says that it is, in turn
    enough: threading.Event = field(default_factory=threading.Event)

    def read(self, service: Served) -> None:
        with Client(service.grpc, retries=0) as client:
            prompt = f"Once {self.number}"
            for chunk in client.stream(prompt, max_tokens=ENDLESS, ignore_eos=True, temperature=0.0):
                self.weights += [chunk.weights.contents] if chunk.HasField("weights") else []
                for choice in chunk.choices:
                    self.ids += choice.token_ids
                if self.enough.is_set():
                    return


@contextmanager
def streaming(service: Served) -> Iterator[list[Stream]]:
    """So many have begun; they are read until this is left, and live until then."""
    streams = [Stream(number) for number in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as threads:
        futures = [threads.submit(one.read, service) for one in streams]
        try:
            go_on(streams, 1)
            yield streams
            assert not any(future.done() for future in futures)
        finally:
            for one in streams:
                one.enough.set()
        for future in futures:
            future.result(60)


def go_on(streams: list[Stream], more: int) -> None:
    """Wait until each has so many more tokens."""
    before = [len(one.ids) for one in streams]
    done = lambda: all(len(one.ids) >= then + more for one, then in zip(streams, before, strict=True))  # noqa: E731
    wait_for(done, f"{more} more tokens of each")


def text(service: Served, number: int, tokens: int) -> list[int]:
    with Client(service.grpc, retries=0) as client:
        [choice] = client.complete(f"Once {number}", max_tokens=tokens, ignore_eos=True, temperature=0.0).choices
    return list(choice.token_ids)


def expected(folder: Path, number: int, tokens: int) -> list[int]:
    with Engine(folder, dtype="float32", threads=1, kv_memory_bytes=1 << 26) as engine:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, seed=0)
        return engine.generate(f"Once {number}", params)[0].token_ids


def fingerprint(service: Served) -> str:
    """Return the fingerprint of an answer over HTTP."""
    body = json.dumps({"model": "tiny", "prompt": "Once", "max_tokens": 2}).encode()
    requested = urllib.request.Request(f"{service.http}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(requested, timeout=60) as response:
        return str(json.load(response)["system_fingerprint"])


def versions(service: Served) -> list[int]:
    [pool] = json.loads(motley(service, "status", "--json")[1])["pools"]
    return [int(one.get("weights_version", 0)) for one in pool["replicas"]]


def have_all(service: Served, version: int) -> bool:
    return set(versions(service)) == {version}


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
    with (
        ControlPlaneClient(resolve_contact(fleet.endpoints["admin"], "", None), None, 120.0) as plane,
        streaming(fleet) as streams,
    ):
        for wrong, code in ((frozen, grpc.StatusCode.INVALID_ARGUMENT), (elsewhere, grpc.StatusCode.PERMISSION_DENIED)):
            with pytest.raises(grpc.RpcError) as refused:
                plane.UpdateWeights(pb.UpdateWeightsRequest(path=str(wrong)))
            assert refused.value.code() == code, refused.value.details()
        made = plane.UpdateWeights(pb.UpdateWeightsRequest(path=str(file), expected_version=0))
        assert [(one.weights_version, one.error) for one in made.replicas] == [(1, "")] * 2
        go_on(streams, 200)
    for one in streams:
        assert one.ids == expected(checkpoint, one.number, len(one.ids))
    with ThreadPoolExecutor(STREAMS) as threads:
        for found, right in zip(
            threads.map(lambda number: text(fleet, number, 32), range(STREAMS)),
            [expected(after, number, 32) for number in range(STREAMS)],
            strict=True,
        ):
            assert found == right
    assert fingerprint(fleet).endswith("-1")
    with Client(fleet.grpc) as client:
        reported = client.complete("Once", max_tokens=2).weights
    assert [(one.version, one.contents) for one in reported] == [(1, made.contents)]
    status, _, words = motley(fleet, "update", str(file), "--expect-version", "0")
    assert (status != 0, "version 1 by now" in words) == (True, True), words
    status, reported, words = motley(fleet, "update", str(file), "--expect-version", "1")
    assert (status, "cpu: weights of version 2" in reported) == (0, True), reported + words
    status, _, words = motley(fleet, "scale", "cpu", "3", "--wait")
    assert status == 0, words
    wait_for(lambda: versions(fleet) == [2, 2, 2], "a replica that came later to have the same weights", 60)
    with ThreadPoolExecutor(STREAMS) as threads:
        assert len({tuple(one) for one in threads.map(lambda _: text(fleet, 0, 32), range(STREAMS))}) == 1


def test_a_stream_that_moves_after_an_update_says_so(fleet: Served, checkpoint: Path, roots: Path) -> None:
    """Its replica goes, and nobody has the weights that it began with any more; streams of others are of one model."""
    new = {name: tensor.flip(0) for name, tensor in tensors_of(checkpoint).items() if ".mlp." in name}
    file = written(roots / "flipped.safetensors", new)
    with (
        ControlPlaneClient(resolve_contact(fleet.endpoints["admin"], "", None), None, 120.0) as plane,
        Client(fleet.grpc) as client,
        streaming(fleet) as streams,
    ):
        [old] = client.complete("Once", max_tokens=2).weights
        made = plane.UpdateWeights(pb.UpdateWeightsRequest(path=str(file)))
        assert not any(one.error for one in made.replicas)

        def running() -> dict[str, int]:
            [pool] = plane.GetFleet(pb.GetFleetRequest()).pools
            return {one.replica_id: one.running for one in pool.replicas}

        wait_for(lambda: sum(running().values()) >= STREAMS, "loads that have them")
        busy = running()
        plane.DrainReplica(
            pb.DrainReplicaRequest(replica_id=max(busy, key=busy.__getitem__), timeout_s=0.1, reason="why")
        )
        wait_for(lambda: any(len(one.weights) > 1 for one in streams), "a stream to move")
        go_on(streams, 100)
    moved = [one.weights for one in streams if len(one.weights) > 1]
    assert moved == [[old.contents, made.contents]] * len(moved) != []
    assert [one.weights for one in streams if len(one.weights) == 1] == [[old.contents]] * (STREAMS - len(moved))


def test_one_whose_caller_does_not_wait_comes_to_its_end(
    fleet: Served, checkpoint: Path, roots: Path, tmp_path: Path
) -> None:
    """However far it came: the next is applied, and counted, on every replica, and new ones begin with it."""
    old = {name: tensor for name, tensor in tensors_of(checkpoint).items() if ".mlp." in name}
    one = written(roots / "left.safetensors", {name: tensor * 1.5 for name, tensor in old.items()})
    new = {name: tensor * 0.5 for name, tensor in old.items()}
    two = written(roots / "next.safetensors", new)
    with ControlPlaneClient(resolve_contact(fleet.endpoints["admin"], "", None), None, 120.0) as plane:

        def updated() -> pb.UpdateWeightsReply | None:
            try:
                return plane.UpdateWeights(pb.UpdateWeightsRequest(path=str(two)))
            except grpc.RpcError as error:
                # The one before is under way, or streams of the test before have not been heard to end.
                if error.code() not in (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE):
                    raise
                return None

        for deadline_s in (0.01, 0.03, 0.1):
            with suppress(grpc.RpcError):
                plane.UpdateWeights(pb.UpdateWeightsRequest(path=str(one)), timeout=deadline_s)
            made = wait_for(updated, "the next update")
            assert made.weights_version in [one.weights_version for one in made.replicas]
            # One that the test before has ended, or whose streams are not heard to end yet, takes it a little later.
            wait_for(partial(have_all, fleet, made.weights_version), "the same weights everywhere", 60)
    after = changed(checkpoint, new, tmp_path / "changed")
    assert text(fleet, 0, 32) == expected(after, 0, 32)
    for replicas in ("1", "3"):
        status, _, words = motley(fleet, "scale", "cpu", replicas, "--wait")
        assert status == 0, words
    wait_for(lambda: versions(fleet) == [made.weights_version] * 3, "replicas that begin with the same weights", 120)
    with ThreadPoolExecutor(STREAMS) as threads:
        found = {tuple(one) for one in threads.map(lambda _: text(fleet, 0, 32), range(STREAMS))}
    assert found == {tuple(expected(after, 0, 32))}
