"""A steady client beside a pressure test: neither what it gets nor its pace in the engine may change.

Its pace is counted in the engine's steps, which does not depend on how busy the machine is: a stream that is not held
up gets a token in every step from its first to its last.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from served import Served, wait_for

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc

LENGTH = 1000
REQUEST = pb.CompleteRequest(
    text="a steady neighbour", sampling=pb.SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
)
LEAST_SHARE = 0.7  # steps are asked for over HTTP, and some go by meanwhile; mostly it is 1.0


class Neighbour:
    """Streams the same request again and again.

    may_be_refused  before a stream has begun, with a time to come again: as the contract has it where the queue is
                    full. What has begun goes on to its end, always.
    """

    def __init__(self, service: Served, *, may_be_refused: bool = False) -> None:
        self._service = service
        self._may_be_refused = may_be_refused
        self._stop = threading.Event()
        self.streaming = False
        self.seconds: list[float] = []  # of each answer, from asking to its end
        self.shares: list[float] = []  # tokens for each step that the engine took meanwhile
        self.answers: list[tuple[int, ...]] = []
        self.refused = 0
        self.failure: BaseException | None = None
        with grpc.insecure_channel(service.grpc) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            self.alone = self._once(stub)
            assert self._once(stub) == self.alone
        assert len(self.alone) == LENGTH
        self.alone_ms = 1e3 * min(self.seconds)
        self.seconds.clear()
        self.shares.clear()

    @contextmanager
    def beside(self) -> Iterator[Neighbour]:
        """Streams when it is entered, and meanwhile. Raises what went wrong with it."""
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            wait_for(lambda: self.streaming or self.failure, "the neighbour's first stream")
            yield self
        finally:
            self._stop.set()
            thread.join(120)
        assert not thread.is_alive(), "its last answer did not come"
        if self.failure is not None:
            raise self.failure
        assert set(self.answers) == {self.alone}, "a neighbour's answer changed"
        assert self.shares, "no stream lasted until the engine's steps were told"
        assert statistics.median(self.shares) > LEAST_SHARE, f"it was held up: {self.shares}"

    def pace(self) -> str:
        """What its answers took, alone and meanwhile."""
        ordered = sorted(self.seconds)
        p50, p90 = (1e3 * ordered[int(len(ordered) * share)] for share in (0.5, 0.9))
        return (
            f"neighbour's {len(self.answers)} answers right, {statistics.median(self.shares):.2f} tokens a step; "
            f"alone {self.alone_ms:.0f} ms, meanwhile p50 {p50:.0f} ms, p90 {p90:.0f} ms; "
            f"refused {self.refused} times before it began"
        )

    def _run(self) -> None:
        try:
            with grpc.insecure_channel(self._service.grpc) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                while not self._stop.is_set():
                    try:
                        self.answers.append(self._once(stub))
                    except grpc.RpcError as error:
                        self._check_refusal(error)
                        self._stop.wait(0.2)
        except BaseException as error:  # noqa: BLE001  told by `beside`
            self.failure = error

    def _check_refusal(self, error: grpc.RpcError) -> None:
        refused = error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and not self.streaming
        if not (refused and self._may_be_refused):
            raise error
        assert int(dict(error.trailing_metadata())["retry-after"]) >= 1
        self.refused += 1

    def _once(self, stub: inference_pb2_grpc.InferenceStub) -> tuple[int, ...]:
        began, before, first = time.monotonic(), 0, 0
        tokens: list[int] = []
        self.streaming = False
        for chunk in stub.CompleteStream(REQUEST, timeout=120):
            tokens += [token for choice in chunk.choices for token in choice.token_ids]
            if tokens and not before:
                self.streaming, first, before = True, len(tokens), self._service.load()["steps"]
        self.seconds.append(time.monotonic() - began)
        steps = self._service.load()["steps"] - before
        if steps:  # else all was over when they were first told
            self.shares.append((len(tokens) - first) / steps)
        return tuple(tokens)
