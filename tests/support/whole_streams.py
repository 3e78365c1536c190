"""A client that reads one stream after the other to its end, beside whatever a test does."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from neighbour import OWN
from serve_process import wait_for

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc

STREAM_TOKENS = 2000


@contextmanager
def whole_streams(address: str, metadata: Sequence[tuple[str, str]] = ()) -> Iterator[Any]:
    """Read streams for as long as this lasts, over a channel of which the stub is given; asserts each to be whole.

    Each must have the tokens that a stream has which is alone, once all is over.
    """
    enough, streams = threading.Event(), list[list[int]]()
    with grpc.insecure_channel(address, OWN) as channel, ThreadPoolExecutor(1) as threads:
        stub = inference_pb2_grpc.InferenceStub(channel)
        reading = threads.submit(_read, stub, metadata, streams, enough)
        try:
            wait_for(lambda: (streams and streams[0]) or reading.done(), "its first tokens")
            yield stub
        finally:
            enough.set()
        reading.result(600)
        alone: list[list[int]] = []
        _read(stub, metadata, alone, enough)
    assert len(alone[0]) == STREAM_TOKENS
    assert all(tokens == alone[0] for tokens in streams)


def _read(stub: Any, metadata: Sequence[tuple[str, str]], streams: list[list[int]], enough: threading.Event) -> None:
    """Adds a stream to `streams`, and others until there are enough."""
    sampling = pb.SamplingParams(temperature=0, max_tokens=STREAM_TOKENS, ignore_eos=True)
    while not streams or not enough.is_set():
        streams.append([])
        for chunk in stub.CompleteStream(pb.CompleteRequest(text="beside", sampling=sampling), metadata=metadata):
            streams[-1] += [token for choice in chunk.choices for token in choice.token_ids]
