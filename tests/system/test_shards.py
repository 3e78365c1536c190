"""Replicas whose model is divided among processes: one of these is killed or hangs under live streams."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from served import Served, alive, command_line, descendants, served, wait_for

from motley.client import Client
from motley.cluster.protos import inference_pb2 as pb

STREAMS, TOKENS = 8, 400
SAMPLING = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}


@pytest.fixture(scope="module", params=["--tensor-parallel", "--pipeline-parallel"])
def divided(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Two processes each: two ranks of every layer, or two stages."""
    arguments = [str(checkpoint), "--served-model-name", "tiny", request.param, "2", "--threads", "2"]
    arguments += ["--kv-memory", "64MiB", "--replicas", "2", "--max-running", "4", "--no-control"]
    with served(arguments, tmp_path_factory.mktemp("divided")) as service:
        service.wait_ready()
        yield service
    assert alive(ranks_of(os.getpid())) == []


def ranks_of(pid: int) -> list[int]:
    return [each for each in descendants(pid) if "shards.follower" in command_line(each)]


def leaders(service: Served) -> list[int]:
    """Replicas whose other process runs."""
    return [pid for pid in service.replicas() if len(ranks_of(pid)) == 1]


def text(service: Served, number: int, begun: threading.Event | None = None) -> tuple[list[int], list[int], list[int]]:
    """Token ids, how it ended, and how many tokens the service counted."""
    ids: list[int] = []
    ends: list[int] = []
    counted: list[int] = []
    with Client(service.grpc, retries=0) as client:  # that it goes on is the service's doing
        for chunk in client.stream(f"Once {number}", seed=number, **SAMPLING):
            if begun is not None:
                begun.set()
            for choice in chunk.choices:
                ids += choice.token_ids
                ends += [choice.finish_reason] if choice.finish_reason else []
            if chunk.HasField("usage"):
                counted.append(chunk.usage.completion_tokens)
    return ids, ends, counted


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_go_on_elsewhere(fault: signal.Signals, divided: Served) -> None:
    """Every token once, and as it would have been; the replica is replaced, with all its processes."""
    wait_for(lambda: len(leaders(divided)) == 2, "two replicas of two processes", 120)
    whole = [text(divided, number) for number in range(STREAMS)]
    begun = [threading.Event() for _ in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as threads:
        futures = [threads.submit(text, divided, number, begun[number]) for number in range(STREAMS)]
        assert all(each.wait(60) for each in begun)  # four run on each
        before = ranks_of(divided.process.pid)
        os.kill(before[0], fault)
        assert [future.result(120) for future in futures] == whole
    assert [each[1:] for each in whole] == [([pb.FINISH_REASON_LENGTH], [TOKENS])] * STREAMS
    wait_for(lambda: not alive(before[:1]), "the lost process to be removed", 90)
    wait_for(lambda: len(leaders(divided)) == 2, "a replica in the place of the lost one", 120)
    assert len(ranks_of(divided.process.pid)) == 2
    divided.wait_idle()
