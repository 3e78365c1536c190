"""New weights for a model whose processes are on several hosts: each host is sent the file once, and has it while it is
needed."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import queue
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from new_weights import changed, of_another, written
from remote_hosts import Elsewhere, Host
from thorough import thorough
from tiny_checkpoints import build_checkpoint

from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import CheckpointError, MotleyError, Unavailable
from motley.replicas.parallel.follower import weight_receiver
from motley.replicas.parallel.follower.weight_receiver import WeightFileReceiver
from motley.replicas.parallel.leader import weight_sender
from motley.replicas.parallel.leader.weight_sender import MAX_UNACKNOWLEDGED, FollowerUpdates
from motley.replicas.parallel.transport.file_identity import local_temp_identity
from motley.replicas.parallel.transport.pipe import MessagePipe
from motley.replicas.types import Request, SamplingParams
from motley.replicas.updates import process_folder
from motley.replicas.updates.weight_file import WeightFile

SHAPES: dict[str, dict[str, Any]] = {
    "ranks": {"tensor_parallel": 2},
    "stages": {"pipeline_parallel": 3, "pipeline_layers": (1, 1, 1)},
    "ranks of stages": {"tensor_parallel": 2, "pipeline_parallel": 2, "pipeline_layers": (1, 2)},
}


def copies(temporary: Path) -> list[Path]:
    return sorted(temporary.glob("motley-weights-*/*.safetensors"))


def checkpoint(folder: Path, seed: int) -> Path:
    return build_checkpoint(folder, "qwen2", seed=seed, num_hidden_layers=3)


async def tokens(worker: Worker, max_tokens: int = 8) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True)
    messages = [message async for message in worker.generate(Request("r", (7, 3, 200, 41), params))]
    return [token for message in messages for delta in message.deltas for token in delta.token_ids]


async def started(folder: Path, shape: str, there: Path | None, full: int = 0) -> Worker:
    """The last two processes, or the other, have temporary files where nothing of the first can be read."""
    config = EngineConfig(dtype="float32", kv_memory_bytes=1 << 20, threads=2, **SHAPES[shape])
    others = config.tensor_parallel * config.pipeline_parallel - 1
    far = Host(temporary=None if there is None else str(there), full=full)
    hosts = [Host()] * (others - 2) + [far] * 2
    worker = Worker(folder, config, launcher=lambda: Elsewhere(hosts))
    await worker.start()
    return worker


@pytest.mark.slow("Four processes take three updates, and four more load the result")
@pytest.mark.parametrize("shape", ["ranks of stages", *thorough("ranks", "stages")])
async def test_processes_of_two_hosts_say_what_those_of_a_fresh_load_do(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a stream runs over it. A file that is needed no more goes, at the latest with the process."""
    monkeypatch.setattr(weight_sender, "PIECE_BYTES", 1000)
    folder, other = (checkpoint(tmp_path / part, seed) for seed, part in enumerate(("one", "two")))
    (there := tmp_path / "there").mkdir()
    worker = await started(folder, shape, there)
    try:
        kept = []
        for version, part in enumerate(("q_proj", "layers.1.", "q_proj"), 1):
            new = of_another(folder, other, lambda name, part=part: part in name)  # type: ignore[misc]
            new = {name: tensor * version for name, tensor in new.items()}
            file = WeightFile(written(tmp_path / f"{version}.safetensors", new))
            old = await tokens(worker)
            over = asyncio.create_task(tokens(worker))
            assert await worker.update_weights(file) == version
            found = await tokens(worker)
            assert found != old
            assert await over in (old, found)
            folder = changed(folder, new, tmp_path / f"changed{version}")
            kept.append([path.name for path in copies(there)])
        assert kept[:2] == [["1.safetensors"], ["1.safetensors", "2.safetensors"]]
        # Of the third there is all that the first had, and of the second what is in other layers' parts.
        await _until(lambda: [path.name for path in copies(there)] == ["2.safetensors", "3.safetensors"])
        for path in copies(there):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        fresh = await started(folder, shape, None)
        try:
            assert await tokens(fresh) == found
            assert worker.profile().fingerprint == fresh.profile().fingerprint
        finally:
            await fresh.close()
    finally:
        await worker.close()
    assert list(there.iterdir()) == []


async def test_where_a_host_has_no_room_all_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where something else comes than was sent."""
    folder, other = (checkpoint(tmp_path / part, seed) for seed, part in enumerate(("one", "two")))
    (there := tmp_path / "there").mkdir()
    file = WeightFile(written(tmp_path / "new.safetensors", of_another(folder, other, lambda name: "mlp" in name)))
    worker = await started(folder, "stages", there, full=1)
    try:
        old = await tokens(worker)
        with pytest.raises(
            Unavailable,
            match=r"the new weights cannot be stored in this host's temporary folder: No space .*\(stage 1 on ",
        ) as no:
            await worker.update_weights(file)
        assert no.value.code == "no_room"
        with monkeypatch.context() as patched:
            other_digest = SimpleNamespace(sha256=lambda: hashlib.sha256(b"something else"))
            patched.setattr(weight_sender, "hashlib", other_digest)
            with pytest.raises(CheckpointError, match="what came has the SHA-256"):
                await worker.update_weights(file)
        assert copies(there) == []
        assert await tokens(worker) == old
        assert await worker.update_weights(file) == 1  # what they had of it does not stand in the way
        assert await tokens(worker) != old
    finally:
        await worker.close()


async def _until(true: Callable[[], bool]) -> None:
    """Wait for what another process does soon."""
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never was")


@dataclass
class Far:
    """Another process, as `FollowerUpdates` has it, in threads of this one: it answers that it has prepared whatever
    it is to.

    full  there is no room there; ahead: most pieces that were on their way at once
    """

    name: str
    full: bool = False
    prepared_of: list[str] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    ahead: int = 0

    def __post_init__(self) -> None:
        orders, answers = os.pipe(), os.pipe()
        self.pipe, self._theirs = MessagePipe(answers[0], orders[1]), MessagePipe(orders[0], answers[1])
        self.arrivals = WeightFileReceiver(self._theirs)
        self._said: dict[str, queue.SimpleQueue[dict[str, Any]]] = {
            "took": queue.SimpleQueue(), "prepared": queue.SimpleQueue()
        }  # fmt: skip
        for work in (self._follow, self._hear):
            threading.Thread(target=work, daemon=True).start()

    def took(self) -> dict[str, Any]:
        return self._said["took"].get(timeout=30)

    def prepared(self) -> dict[str, Any]:
        return self._said["prepared"].get(timeout=30)

    def close(self) -> None:
        self.pipe.close_writing()
        self.arrivals.close()

    def _follow(self) -> None:
        try:
            while True:
                fields, _ = self._theirs.receive()
                if "prepare" in fields:
                    self.prepared_of.append(fields["file"])
                    self._theirs.send({"prepared": fields["prepare"]})
                else:
                    self.arrivals.sweep(fields["settled"], [Path(each) for each in self.prepared_of[-1:]])
                    self.forgotten.append(fields["forget"])
        except EOFError:
            self._theirs.close_writing()

    def _hear(self) -> None:
        try:
            while True:
                fields, _ = self.pipe.receive()
                self._said["took" if "took" in fields else "prepared"].put(fields)
        except EOFError:
            return


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Far]]:
    monkeypatch.setattr(process_folder.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(weight_sender, "PIECE_BYTES", 100)
    made: list[Far] = []

    def make(name: str, **more: Any) -> Far:
        made.append(Far(name, **more))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_host_is_sent_a_file_once(far: Callable[..., Far], tmp_path: Path) -> None:
    """The first of its processes has it, and all read it there; who is on this host reads this one."""
    members = [far("near"), far("a1"), far("b1"), far("a2")]
    updates = FollowerUpdates(members)  # type: ignore[arg-type]
    updates.temporaries = [local_temp_identity(), "a", "b", "a"]
    (file := tmp_path / "file").write_bytes(os.urandom(12345))
    updates.prepare(1, file)
    [near], [a1], [b1], [a2] = (each.prepared_of for each in members)
    assert near == str(file)
    assert a1 == a2
    assert len({near, a1, b1}) == 3
    assert [Path(each).read_bytes() for each in (a1, b1)] == [file.read_bytes()] * 2
    assert len(copies(tmp_path)) == 2
    updates.prepare(2, file)
    updates.forget(1)
    updates.prepare(3, file)  # after which all have forgotten
    assert sorted(map(str, copies(tmp_path))) == sorted(
        str(each) for one in members[1:3] for each in one.prepared_of[1:]
    )


def test_where_one_host_cannot_take_it_no_host_keeps_any(
    far: Callable[..., Far], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is any process told to prepare it; and the next is none the worse."""
    members = [far("a"), far("b"), far("c")]
    updates = FollowerUpdates(members)  # type: ignore[arg-type]
    updates.temporaries = ["a", "b", "c"]
    (file := tmp_path / "file").write_bytes(os.urandom(12345))
    turn = iter([0, errno.ENOSPC, 0])

    def full(*given: int) -> None:
        if number := next(turn):
            raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(weight_receiver.os, "posix_fallocate", full)
        with pytest.raises(MotleyError, match="No space left") as refused:
            updates.prepare(1, file)
    assert refused.value.code == "no_room"
    assert [each.prepared_of for each in members] == [[], [], []]
    updates.prepare(1, file)
    assert [Path(each.prepared_of[0]).read_bytes() for each in members] == [file.read_bytes()] * 3
    assert len(copies(tmp_path)) == 3


def test_few_pieces_are_on_their_way_at_a_time(far: Callable[..., Far], tmp_path: Path) -> None:
    member = far("a")
    sent, took, ahead = member.pipe.send, member.took, [0]
    most = []

    def send(fields: dict[str, Any], tensors: Any = None) -> None:
        ahead[0] += "delivery" in fields
        most.append(ahead[0])
        sent(fields, tensors)

    def taken() -> dict[str, Any]:
        ahead[0] -= 1
        return took()

    member.pipe.send = send  # type: ignore[method-assign,assignment]
    member.took = taken  # type: ignore[method-assign]
    updates = FollowerUpdates([member])  # type: ignore[list-item]
    updates.temporaries = ["a"]
    (file := tmp_path / "file").write_bytes(os.urandom(5000))
    updates.prepare(1, file)
    assert max(most) == MAX_UNACKNOWLEDGED + 1  # and the word that all has been sent
