"""Replicas whose model is divided among processes: one of these is killed or hangs under live streams."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from serve_process import Served, alive, command_line, descendants, processor_s, served, wait_for
from thorough import thorough

from motley.client import Client
from motley.cluster.protos import inference_pb2 as pb
from motley.kernels.cpu.c_kernels.shm_collectives import TIMEOUT_S
from motley.replicas.parallel.leader.follower_group import REPLY_TIMEOUT_S
from motley.replicas.parallel.transport.heartbeats import HEARTBEAT_S

STREAMS, TOKENS = 8, 800
SAMPLING = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}
GAP_S = 10.0  # from the last token of a stream to its next, by another replica
FOUND_S = (
    max(TIMEOUT_S, REPLY_TIMEOUT_S) + 2 * HEARTBEAT_S
)  # in which a replica finds it, by looks that are a beat apart
FOLLOWERS = ("parallel.follower", "ray::Shard")  # subprocesses of the replica, or actors in its placement group


@dataclass(frozen=True)
class Way:
    """ranks of each of so many stages; bundles: the processes are actors."""

    ranks: int
    stages: int
    bundles: bool = False

    @property
    def others(self) -> int:
        """Processes of a replica besides its first."""
        return self.ranks * self.stages - 1

    def arguments(self, model: Path, folder: Path) -> list[str]:
        bundles = f"    bundles: [{', '.join(['{cpus: 1}'] * (self.others + 1))}]\n"
        file = folder / "fleet.yaml"
        file.write_text(
            f"model: {model}\nserved_model_name: tiny\npools:\n  - name: cpu\n    replicas: 2\n"
            f"    tensor_parallel: {self.ranks}\n    pipeline_parallel: {self.stages}\n"
            f"{bundles if self.bundles else ''}    engine: {{threads: 2, kv_memory: 64MiB, max_running: {STREAMS}}}\n"
        )
        return [str(file), "--no-control"]


WAYS = {
    "ranks": Way(2, 1),
    "stages": Way(1, 2),
    "stages of ranks in bundles": Way(2, 2, bundles=True),
}


@dataclass
class Divided:
    service: Served
    way: Way

    def others(self) -> list[int]:
        return others_of(self.service.process.pid)

    def firsts(self) -> list[int]:
        """Replicas of the pool, which are the first processes of their models."""
        return [pid for pid in self.service.replicas() if ":ingress" not in command_line(pid)]

    def wait_whole(self) -> None:
        """Two replicas with all their processes."""

        def whole() -> bool:
            return len(self.firsts()) == 2 and len(self.others()) == 2 * self.way.others

        wait_for(whole, "two replicas with all their processes", 240)


@pytest.fixture(scope="module", params=["stages", *thorough("stages of ranks in bundles", "ranks")])
def divided(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Divided]:
    way, folder = WAYS[request.param], tmp_path_factory.mktemp("divided")
    with served(way.arguments(checkpoint, folder), folder) as service:
        service.wait_ready()
        before = others_of(service.process.pid)
        yield Divided(service, way)
        before += others_of(service.process.pid)
    wait_for(lambda: alive(before) == [], "the end of all processes")


def found_after(service: Served) -> list[float]:
    """Seconds after which replicas found that a process of theirs was lost, as they say in their logs."""
    folders = [Path(each) for each in service.leftovers()]
    logs = [file for folder in folders for file in folder.glob("ray/session_2*/logs/*.err")]
    return [float(each) for file in logs for each in re.findall(r"found after ([\d.]+) s", file.read_text())]


def moved(service: Served) -> int:
    """How often a stream has gone on elsewhere, say the ingresses in their logs."""
    logs = Path(service.endpoints["folder"], "session_latest", "logs").glob("worker-*.err")
    return sum(log.read_text().count(" goes on elsewhere after ") for log in logs)


def others_of(pid: int) -> list[int]:
    """Return the other processes that run, the eldest first."""
    return sorted(
        each for each in descendants(pid) if any(name in command_line(each) for name in FOLLOWERS) and alive([each])
    )


@dataclass
class Text:
    """ids: of its tokens; ends: how it ended; counted: tokens, by the service; gap_s: the longest between two messages
    of tokens, which is of the client and of this run."""

    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    gap_s: float = field(default=0.0, compare=False)


def text(service: Served, number: int, begun: threading.Event | None = None) -> Text:
    found, last = Text(), None
    with Client(service.grpc, retries=0) as client:  # that it goes on is the service's doing
        for chunk in client.stream(f"Once {number}", seed=number, **SAMPLING):
            if begun is not None:
                begun.set()
            for choice in chunk.choices:
                found.ids += choice.token_ids
                found.ends += [choice.finish_reason] if choice.finish_reason else []
                if choice.token_ids:
                    now = time.monotonic()
                    found.gap_s = max(found.gap_s, now - (last or now))
                    last = now
            if chunk.HasField("usage"):
                found.counted.append(chunk.usage.completion_tokens)
    return found


@pytest.mark.covering
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("whose", ["the first", "another"])
def test_streams_go_on_elsewhere(whose: str, fault: signal.Signals, divided: Divided) -> None:
    """Every token once, and as it would have been, in time; the replica is replaced, with all its processes."""
    divided.wait_whole()
    service = divided.service
    reported, before_it = len(found_after(service)), moved(service)
    begun = [threading.Event() for _ in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as threads:
        whole = list(threads.map(text, [service] * STREAMS, range(STREAMS)))
        before = divided.others()
        used = {pid: processor_s(pid) for pid in (divided.firsts() if whose == "the first" else before)}
        futures = [threads.submit(text, service, number, begun[number]) for number in range(STREAMS)]
        assert all(each.wait(60) for each in begun)  # often about half on each; the other has room for all
        lost = max(used, key=lambda pid: processor_s(pid) - used[pid])  # one that computes them
        os.kill(lost, fault)
        texts = [future.result(120) for future in futures]
    assert texts == whole
    assert [(each.ends, each.counted) for each in whole] == [([pb.FINISH_REASON_LENGTH], [TOKENS])] * STREAMS
    assert moved(service) > before_it, "some ran on the replica that was lost"
    # Half of them lost nothing: what these waited for is the machine's, which is busy as it may be.
    gaps = sorted(each.gap_s for each in texts)
    busy = gaps[STREAMS // 2 - 1]
    assert gaps[-1] < GAP_S + busy, gaps
    if whose == "another":

        def word() -> list[float]:
            """Streams of that replica may have ended before: then it finds the loss in its next step."""
            if not (said := found_after(service)[reported:]):
                text(service, 0)
            return said

        found = wait_for(word, "the replica's own word")
        assert max(found) < FOUND_S + busy, (found, gaps)
    wait_for(lambda: not alive([lost]), "the lost process to be removed", 90)
    divided.wait_whole()
    assert len(set(divided.others()) & set(before)) == divided.way.others, "those of the other replica alone"
    service.wait_idle()
