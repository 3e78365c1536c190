"""The processes of one engine: the first rank of the first stage is this one, the others are started here."""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...kernels.batch import StepBatch
from ...kernels.cpu.build import library
from ...kernels.cpu.exchange import SharedExchange, open_memory
from ...kernels.ops import Ops
from ..checkpoint import Checkpoint
from ..cores import usable_cores
from ..decoder import Stream
from ..engine_config import EngineConfig
from ..errors import CheckpointError, EngineFault, EngineLost, InvalidRequest
from ..plan import StepPlan
from . import calls
from .copies import Copies
from .host import SharedHost, shares_of
from .pipe import Inbox, Pipe
from .ranks import Ranks
from .split import split
from .stages import stages_of

__all__ = ["Group", "config_of_process", "is_divided"]

log = logging.getLogger(__name__)

END_S = 5.0
ASK_AFTER_S = 1.0  # without an answer of the last stage: then all are asked whether they live,
ANSWER_S = 5.0  # and have so long to say so, whatever they compute


def is_divided(config: EngineConfig) -> bool:
    """Whether more than one process has a part of the model."""
    return config.tensor_parallel > 1 or config.pipeline_parallel > 1


def config_of_process(config: EngineConfig) -> EngineConfig:
    """With a process's share of the threads. Raises InvalidRequest for what ranks and stages cannot do."""
    ranks = config.tensor_parallel > 1
    param, what = ("tensor_parallel", "ranks") if ranks else ("pipeline_parallel", "stages")
    if config.device != "cpu":
        raise InvalidRequest(f"{param}: {what} are of a CPU so far, and not of GPUs", param=param)
    if ranks and library()[0] is None:
        raise InvalidRequest(f"{param}: {what} need the C kernels: {library()[1]}", param=param)
    if config.swap_memory_bytes:
        message = f"swap_memory_bytes: preempted KV of several {what} is computed again so far"
        raise InvalidRequest(message, param="swap_memory_bytes")
    processes = config.tensor_parallel * config.pipeline_parallel
    return replace(config, threads=max(1, (config.threads or usable_cores()) // processes), swap_memory_bytes=0)


class Group:
    """Starts the other processes, which load at once. `config`: of a process; layers: of each stage, and why so many;
    fingerprint: of the model, if it is known before any of it is read.

    ranks   of the first stage; None: layers are not divided
    stages  all of them, in order
    shares  what each process has of a block of KV, stage by stage
    hosts   after `allocate`: of each of the other processes its part of the host's blocks, where there are any
    copies  between KV and the host, that the others make

    Raises InvalidRequest where the model cannot be divided so.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: EngineConfig, layers: Sequence[int], why: str, *, fingerprint: str = ""
    ) -> None:
        size = config.tensor_parallel
        self.stages = stages_of(checkpoint.config.num_layers, layers)
        parts = [split(checkpoint.config, checkpoint.format, rank, size) for rank in range(size)] if size > 1 else []
        self.why = why
        self.shares = shares_of(checkpoint.config, self.stages, parts)
        self.hosts: list[SharedHost] = []
        self.copies = Copies(len(self.shares) - 1)
        self._head_dim = checkpoint.config.head_dim
        self._host_files: list[int] = []  # of the other processes, until `allocate`
        self.ranks: Ranks | None = None
        self._exchange: SharedExchange | None = None
        self._after: int | None = None  # where the first stage writes for the next
        self._followers: list[_Follower] = []
        self._closed = False
        start: dict[str, Any] = {"folder": str(checkpoint.folder), "size": size}
        start["config"] = asdict(replace(config, pipeline_layers=None))
        start |= {"layers": list(layers), "fingerprint": fingerprint}
        try:
            with ExitStack() as given:  # what is given to others is closed here
                memories = [_opened(given, open_memory(size)) if size > 1 else None for _ in self.stages]
                if memories[0] is not None:
                    self._exchange = SharedExchange(memories[0], 0, size)
                    self.ranks = Ranks(parts, 0, self._exchange)
                before: list[int | None] = [None] * size
                for stage in self.stages:
                    links = [(None, None) if stage.is_last else os.pipe() for _ in range(size)]
                    for rank, (reads, writes) in enumerate(links):
                        _opened(given, reads)
                        if (stage.index, rank) == (0, 0):
                            self._after = writes
                            continue
                        _opened(given, writes)
                        self._host_files.append(os.memfd_create("motley-host-kv"))
                        ends = {"memory": memories[stage.index], "before": before[rank], "after": writes}
                        ends["host"] = self._host_files[-1]
                        who = {"stage": stage.index, "rank": rank, "name": _name(self.stages, stage.index, size, rank)}
                        self._followers.append(_Follower(start | ends | who, self._ended))
                    before = [reads for reads, _ in links]
        except BaseException:
            self.lose()
            self._close_files()
            raise
        self._handing_on = Pipe(writes=self._after)

    def digests(self) -> list[Sequence[bytes]]:
        """Of the other processes' weights, when all have loaded. Raises EngineFault if one has not."""
        every = [follower.receive()["digests"] for follower in self._followers]
        return [[bytes.fromhex(digest) for digest in digests] for digests in every]

    def block_bytes(self, ops: Ops) -> int:
        """Of KV of a block, in all processes together."""
        return sum(self._block_bytes(ops))

    def allocate(self, blocks: int, host_blocks: int, ops: Ops, fingerprint: str) -> None:
        """Room for KV in every other process, which takes calls from then on. Raises EngineFault.

        host_blocks  of the host's memory, for what comes and goes
        fingerprint  of the model: by it they keep what they have repacked
        """
        for file, nbytes in zip(self._host_files, self._block_bytes(ops)[1:], strict=True):
            if host_blocks:
                os.ftruncate(file, host_blocks * nbytes)
                self.hosts.append(SharedHost(file))
        self._close_files()
        for follower in self._followers:
            follower.pipe.send({"blocks": blocks, "host_blocks": host_blocks, "fingerprint": fingerprint})
        for follower in self._followers:
            follower.receive()
        for number, follower in enumerate(self._followers):
            follower.listen(partial(self.copies.made, number), self._ended)

    def call(self, method: str, argument: StepBatch | torch.Tensor, version: int = 0) -> None:
        """They begin, with weights of that version. Raises EngineLost."""
        self._send(self._followers, method, argument, version)

    def call_last(self, method: str, argument: torch.Tensor) -> None:
        """The last stage begins, whose answer is one more of `answer`. Raises EngineLost."""
        self._send(self._followers[-self._followers[0].size :], method, argument)

    def copy(self, plan: StepPlan) -> None:
        """They copy what the plan says between KV and the host, after what they were told before. Raises EngineLost."""
        self.copies.asked += 1
        message = calls.copies_message(self.copies.asked, plan)
        for follower in self._followers:
            follower.pipe.send(*message)

    def hand_on(self, stream: Stream) -> None:
        """To the second stage, what the first has made of the last call. Raises EngineLost."""
        self._handing_on.send(*calls.stream_message(stream))

    def answer(self) -> torch.Tensor:
        """Of the last stage, to the next of the calls that have none yet.

        Raises EngineLost when a process has ended, or does not say within ANSWER_S that it lives.
        """
        answers = self._followers[-self._followers[0].size].inbox
        assert answers is not None
        while True:
            try:
                return answers.receive(ASK_AFTER_S)[1]["found"]
            except queue.Empty:
                for follower in self._followers:
                    follower.ask()
            except EOFError:
                raise EngineLost("a stage has ended") from None

    def prepare(self, version: int, file: Path) -> None:
        """Weights of that version on every other rank, beside those before it: all of them, or none.

        Raises CheckpointError where a rank could not, EngineFault if one has gone.
        """
        assert len(self.stages) == 1, "stages keep the weights that they have"
        for follower in self._followers:
            follower.pipe.send({"prepare": version, "file": str(file)})
        answers = [follower.receive() for follower in self._followers]
        failed = next((answer["failed"] for answer in answers if "failed" in answer), None)
        if failed is not None:
            self.forget(version)
            raise CheckpointError(f"a rank could not take it: {failed}", file=file.name)

    def forget(self, version: int) -> None:
        """Weights of that version: no step is computed with them any more. Raises EngineLost."""
        for follower in self._followers:
            follower.pipe.send({"forget": version})

    def lose(self) -> None:
        """No step comes to an end any more."""
        self._ended()
        for follower in self._followers:
            follower.kill()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._ended()
            for follower in self._followers:
                follower.close()
            self._close_files()
            if self._after is not None:
                os.close(self._after)

    def _send(
        self, followers: Sequence[_Follower], method: str, argument: StepBatch | torch.Tensor, version: int = 0
    ) -> None:
        message = calls.message(method, argument, version)
        for follower in followers:
            follower.pipe.send(*message)

    def _ended(self) -> None:
        """One of them has: nobody waits for it any longer. From any thread."""
        if self._exchange is not None:
            self._exchange.abort()
        self.copies.lose()
        for follower in self._followers:
            if follower.inbox is not None:
                follower.inbox.close()

    def _block_bytes(self, ops: Ops) -> list[int]:
        return [sum(part.nbytes for part in share.block(ops, self._head_dim)) for share in self.shares]

    def _close_files(self) -> None:
        while self._host_files:
            os.close(self._host_files.pop())


class _Follower:
    """start: what it is told first. ended: called when its process has.

    inbox  what it says, once it is listened to
    """

    def __init__(self, start: dict[str, Any], ended: Callable[[], None]) -> None:
        self.inbox: Inbox | None = None
        self.size: int = start["size"]
        self._name, self._closing = start["name"], False
        self._asked: float | None = None  # monotonic: since when it has not said that it lives
        self._process: subprocess.Popen[bytes]
        started = threading.Event()
        # The thread that starts it lives as long as it does: Linux takes a thread's end for the parent's.
        passed = [each for name in ("memory", "before", "after", "host") if (each := start[name]) is not None]
        threading.Thread(target=self._run, args=(passed, ended, started), name=self._name, daemon=True).start()
        started.wait()
        if not hasattr(self, "_process"):
            raise EngineFault(f"{self._name} could not be started; the log says why")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.pipe = Pipe(self._process.stdout.fileno(), self._process.stdin.fileno())
        self.pipe.send(start | {"parent": os.getpid()})

    def receive(self) -> dict[str, Any]:
        """Raises EngineFault."""
        try:
            return (self.pipe if self.inbox is None else self.inbox).receive()[0]
        except EOFError as error:
            if self.inbox is not None:  # which another one's end closes as well
                raise EngineFault("a process of the model has ended; its log says why") from error
            status = self._process.wait()
            raise EngineFault(f"{self._name} ended with status {status}; its log says why") from error

    def listen(self, copied: Callable[[int], None], ended: Callable[[], None]) -> None:
        """To what it says from now on. What it has copied, and that it lives, is no answer to anything."""

        def heed(fields: dict[str, Any]) -> bool:
            if "copied" in fields:
                copied(fields["copied"])
            elif "ping" in fields:
                self._asked = None
            else:
                return False
            return True

        self.inbox = Inbox(self.pipe, f"{self._name}: answers", heed, ended)

    def ask(self) -> None:
        """Whether it lives. Raises EngineLost if it was asked long ago and has not said so."""
        asked, now = self._asked, time.monotonic()
        if asked is None:
            self._asked = now
            self.pipe.send({"ping": now})
        elif now - max(asked, self.pipe.heard) > ANSWER_S:  # a large answer may be on its way
            raise EngineLost(f"{self._name} has said nothing for {ANSWER_S:g} s")

    def close(self) -> None:
        self._closing = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """One that has stopped ends in no other way."""
        self._closing = True
        self._process.kill()

    def _run(self, passed: list[int], ended: Callable[[], None], started: threading.Event) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "motley.replicas.shards.follower"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=passed,
            )
        finally:
            started.set()
        status = self._process.wait()
        if not self._closing:
            log.error("%s ended with status %d", self._name, status)
        ended()


def _name(stages: Sequence[Any], stage: int, size: int, rank: int) -> str:
    if len(stages) == 1:
        return f"rank {rank}"
    return f"stage {stage}" if size == 1 else f"stage {stage}, rank {rank}"


def _opened(given: ExitStack, descriptor: int | None) -> int | None:
    """Closed at the end of `given`."""
    if descriptor is not None:
        given.callback(os.close, descriptor)
    return descriptor
