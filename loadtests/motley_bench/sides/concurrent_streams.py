"""Concurrent streams through a worker, as in a replica, and the times and rates that are computed from them."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from motley.replicas.host.measurement_rows import quantile
from motley.replicas.sampling_params import SamplingParams
from motley.replicas.types import Request, StreamMessage

from .side_process import prompt


class StreamGenerator(Protocol):
    """Interface of a worker, as far as it is used here."""

    def generate(self, request: Request) -> AsyncIterator[StreamMessage]: ...


@dataclass(slots=True)
class StreamTimes:
    """Record of one stream, with times in monotonic seconds.

    began  when the request was sent
    times  time and number of tokens of each message that had tokens
    """

    began: float
    times: list[tuple[float, int]] = field(default_factory=list)
    ended: bool = False

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.times)


def requests_of(count: int, prompt_tokens: int, output_tokens: int, vocab_size: int, seed: int) -> list[Request]:
    """Return greedy requests of exactly these lengths, no two of which begin alike.

    seed  seed of the first prompt; each further prompt has the next one
    """
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, seed=0)
    return [
        Request(f"bench-{number}", tuple(prompt(prompt_tokens, vocab_size, number)), params)
        for number in range(seed, seed + count)
    ]


async def drive(
    worker: StreamGenerator, requests: Sequence[Request], limit_s: float, clock: Callable[[], float] = time.monotonic
) -> list[StreamTimes]:
    """Send all requests at once and record their streams until all end or `limit_s` seconds are over.

    Raises what a stream raises.
    """
    heard: list[StreamTimes] = []

    async def listen(request: Request) -> None:
        mine = StreamTimes(clock())
        heard.append(mine)
        async for message in worker.generate(request):
            if tokens := sum(len(delta.token_ids) for delta in message.deltas):
                mine.times.append((clock(), tokens))
        mine.ended = True

    tasks = [asyncio.ensure_future(listen(request)) for request in requests]
    try:
        done, _ = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()  # closes the stream, which cancels the request
        await asyncio.gather(*tasks, return_exceptions=True)
    return heard


def summary(heard: Sequence[StreamTimes]) -> dict[str, Any]:
    """Return times and rates of recorded streams.

    output_tokens_per_s  output tokens of all streams per second, where the time includes the prompts
    ttft_s               median time to first token, with all requests sent at once
    step_s               times between messages of the first stream while every stream decodes; None if they never all
                         did
    decode_tokens_per_s  rate of all streams together in that time
    complete             True if no stream was cut off
    """
    times = [when for stream in heard for when, _ in stream.times]
    complete = all(stream.ended for stream in heard)
    found: dict[str, Any] = {
        "streams": len(heard),
        "complete": complete,
        "tokens": sum(stream.tokens for stream in heard),
    }
    if not times:
        return found | dict.fromkeys(("seconds", "output_tokens_per_s", "ttft_s", "step_s", "decode_tokens_per_s"))
    seconds = max(times) - min(stream.began for stream in heard)
    found |= {"seconds": seconds, "output_tokens_per_s": found["tokens"] / seconds}
    found["ttft_s"] = statistics.median(stream.times[0][0] - stream.began for stream in heard if stream.times)
    return found | _decoding(heard)


def _decoding(heard: Sequence[StreamTimes]) -> dict[str, Any]:
    """Return the figures of the time in which every stream decodes: (last stream's first token .. first stream's last
    token].
    """
    nothing: dict[str, Any] = {"step_s": None, "decode_tokens_per_s": None}
    if not all(stream.times for stream in heard):
        return nothing
    begin = max(stream.times[0][0] for stream in heard)
    end = min(stream.times[-1][0] for stream in heard)
    tokens = sum(count for stream in heard for when, count in stream.times if begin < when <= end)
    marks = [when for when, _ in heard[0].times if begin <= when <= end]
    gaps = [after - before for before, after in itertools.pairwise(marks)]
    if end <= begin or not gaps:
        return nothing
    step = {"p20": quantile(gaps, 0.2), "p50": statistics.median(gaps), "p80": quantile(gaps, 0.8)}
    return {"step_s": step, "decode_tokens_per_s": tokens / (end - begin)}
