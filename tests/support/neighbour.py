"""A steady client beside a pressure test: what it gets must not change, and its pace is shown."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc

REQUEST = pb.CompleteRequest(
    text="a steady neighbour", sampling=pb.SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
)


class Neighbour:
    """Streams the same request again and again."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._stop = threading.Event()
        self.seconds: list[float] = []  # of each answer, from asking to its end
        self.answers: list[tuple[int, ...]] = []
        self.refused = 0
        self.failure: BaseException | None = None
        with grpc.insecure_channel(target) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            self.alone = self._once(stub)
            for _ in range(5):
                assert self._once(stub) == self.alone
        self.alone_ms = 1e3 * statistics.median(self.seconds)
        self.seconds.clear()

    @contextmanager
    def beside(self) -> Iterator[Neighbour]:
        """Runs meanwhile. Raises what went wrong with it."""
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join(120)
        assert not thread.is_alive(), "its last answer did not come"
        if self.failure is not None:
            raise self.failure
        assert set(self.answers) == {self.alone}, "a neighbour's answer changed"

    def pace(self) -> str:
        """What its answers of 64 tokens took, alone and meanwhile."""
        ordered = sorted(self.seconds)
        p50, p90 = (1e3 * ordered[int(len(ordered) * share)] for share in (0.5, 0.9))
        return (
            f"neighbour's {len(self.answers)} answers right; alone p50 {self.alone_ms:.0f} ms, "
            f"meanwhile p50 {p50:.0f} ms, p90 {p90:.0f} ms"
        )

    def _run(self) -> None:
        try:
            with grpc.insecure_channel(self._target) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                while not self._stop.is_set():
                    try:
                        self.answers.append(self._once(stub))
                    except grpc.RpcError as error:
                        if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                            raise
                        self.refused += 1
                        self._stop.wait(0.2)
        except BaseException as error:  # noqa: BLE001  told by `beside`
            self.failure = error

    def _once(self, stub: inference_pb2_grpc.InferenceStub) -> tuple[int, ...]:
        began = time.monotonic()
        chunks = list(stub.CompleteStream(REQUEST, timeout=120))
        self.seconds.append(time.monotonic() - began)
        return tuple(token for chunk in chunks for choice in chunk.choices for token in choice.token_ids)
