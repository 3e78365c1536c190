"""The door is lost under live streams: our client goes on with them, others hear of it. In the end it is shut."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc
import openai
import pytest
from early_stop import early_stop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_http import post
from served import Served, command_line, wait_for

from motley.client import AsyncClient, Client
from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc

TOKENS = 2000
SEVERAL = 2
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1, "presence_penalty": 0.5, "logprobs": 1},
    {"temperature": 1.0, "seed": 2, "n": 3, "min_tokens": 50},  # and a stop, found when the service runs
    {"temperature": 1.0},  # no seed: the door draws one, and tells it with its first message
]


class Heard:
    """What a client hears of its choices, and of all together."""

    def __init__(self) -> None:
        self.choices: dict[int, list[Any]] = {}
        self.seeds: list[int] = []
        self.usages: list[int] = []
        self.cut: list[tuple[int, int]] = []  # each time it was asked for again: choices that had ended, tokens so far

    @property
    def ended(self) -> int:
        return sum(bool(choice[3]) for choice in [*self.choices.values()])

    def asking(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A stub's method that notes what it is asked to continue."""

        def ask(request: pb.CompleteRequest, **options: Any) -> Any:
            if num_tokens := sum(len(ids.ids) for ids in request.output_ids):
                self.cut.append((self.ended, num_tokens))
            return method(request, **options)

        return ask

    def add(self, chunk: Any) -> None:
        if chunk.HasField("started"):
            self.seeds.append(chunk.started.seed)
        if chunk.HasField("usage"):
            self.usages.append(chunk.usage.completion_tokens)
        for choice in chunk.choices:
            text, ids, logprobs, ends = self.choices.setdefault(choice.index, ["", [], [], []])
            ends += [(choice.finish_reason, choice.stop_string)] if choice.finish_reason else []
            ids += choice.token_ids
            logprobs += [entry.logprob for entry in choice.logprobs]
            self.choices[choice.index] = [text + choice.text, ids, logprobs, ends]

    def same(self, other: Heard) -> bool:
        return (self.choices, self.usages, len(self.seeds)) == (other.choices, other.usages, len(other.seeds))


def options(number: int) -> dict[str, Any]:
    return {"max_tokens": TOKENS, "ignore_eos": True, **SAMPLING[number]}


def blocking(service: Served, number: int, heard: Heard | None = None, **more: Any) -> Heard:
    heard = heard or Heard()
    with Client(service.grpc) as client:
        client.stub.CompleteStream = heard.asking(client.stub.CompleteStream)
        for chunk in client.stream(f"Once {number}", **(options(number) | more)):
            heard.add(chunk)
    return heard


def asynchronous(service: Served, number: int) -> Heard:
    async def read() -> Heard:
        heard = Heard()
        async with AsyncClient(service.grpc) as client:
            async for chunk in client.stream(f"Once {number}", **options(number)):
                heard.add(chunk)
        return heard

    return asyncio.run(read())


def whole(service: Served, number: int) -> list[int]:
    with Client(service.grpc) as client:
        return list(client.complete(f"Once {number}", **options(number)).choices[0].token_ids)


def over_http(service: Served, begun: threading.Event) -> int:
    """How many chunks came, if they ended well. It would take so long that it is always cut."""
    count = 0
    with openai.OpenAI(base_url=f"{service.http}/v1", api_key="none", max_retries=0) as client:
        known = {"temperature": 0.0, "max_tokens": 20 * TOKENS, "extra_body": {"ignore_eos": True}}
        for _ in client.completions.create(model="tiny", prompt="Once 0", stream=True, **known):
            count += 1
            begun.set()
    return count


def strike_the_ingress(service: Served, how: signal.Signals, begun: threading.Event, several: Heard) -> None:
    """While some choices of `several` have ended; streams that have not begun are covered as well."""
    assert begun.wait(60), "a stream that cannot be resumed"
    wait_for(lambda: several.ended, "a choice that ends early")
    [pid] = [pid for pid in service.replicas() if ":ingress" in command_line(pid)]
    os.kill(pid, how)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_door_is_lost(pair: Served, how: signal.Signals) -> None:
    """Killed, it is heard of at once; when it hangs, as soon as Serve has ended it."""
    numbers, begun = range(len(SAMPLING)), threading.Event()
    stops = {SEVERAL: {"stop": [early_stop(pair, f"Once {SEVERAL}", **options(SEVERAL))]}}
    heards = [Heard() for _ in numbers]
    with ThreadPoolExecutor(len(SAMPLING) + 3) as threads:
        streams = [threads.submit(blocking, pair, n, heards[n], **stops.get(n, {})) for n in numbers]
        concurrent = threads.submit(asynchronous, pair, 1)
        answer = threads.submit(whole, pair, 0)
        foreign = threads.submit(over_http, pair, begun)
        strike_the_ingress(pair, how, begun, heards[SEVERAL])
        broken = [future.result(120) for future in streams]
    for number, heard in zip(numbers, broken, strict=True):
        assert len(heard.seeds) == len(heard.usages) == 1
        assert heard.same(blocking(pair, number, seed=heard.seeds[0], **stops.get(number, {}))), SAMPLING[number]
    assert any(0 < ended < 3 for ended, _ in heards[SEVERAL].cut), "one had ended, and others went on elsewhere"
    ends = {reason for _, _, _, [(reason, _)] in heards[SEVERAL].choices.values()}
    assert ends == {pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH}
    assert concurrent.result().same(broken[1])
    assert answer.result() == broken[0].choices[0][1], "what was not streamed is asked for again"
    with pytest.raises(openai.APIConnectionError):  # cannot be resumed, but must not look as if it had ended well
        foreign.result()
    pair.wait_idle()


def test_at_last_streams_that_outlast_the_drain_are_told_so(pair: Served) -> None:
    """SIGTERM: what is new is refused with a time to come again, what runs is not cut off in silence."""
    long, port = {"max_tokens": 60_000, "ignore_eos": True}, pair.http_port
    with ThreadPoolExecutor() as threads, grpc.insecure_channel(pair.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = pb.CompleteRequest(text="abc", sampling=pb.SamplingParams(**long))
        over_grpc = stub.CompleteStream(request)
        chunks = threads.submit(lambda: [*read_to_the_end(over_grpc)])
        over_http = threads.submit(
            asyncio.run, post(port, "/v1/completions", {"prompt": "abc", "stream": True, **long})
        )
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        wait_for(lambda: pair.load()["running"] == 2, "two streams")
        pair.process.send_signal(signal.SIGTERM)
        assert [answer.status for answer in watch] == [health_pb2.HealthCheckResponse.NOT_SERVING]
        late = asyncio.run(post(port, "/v1/completions", {"prompt": "abc"}))
        assert (late.status, late.headers["retry-after"]) == (503, "1")
        with pytest.raises(grpc.RpcError) as caught:
            stub.Complete(request)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        events = over_http.result(30).events()
        assert events[-1]["error"]["code"] == "draining"
        assert len(events) > 2, "it had begun"
        assert chunks.result(30)
        assert over_grpc.code() == grpc.StatusCode.UNAVAILABLE
        assert over_grpc.details() == events[-1]["error"]["message"]
    assert pair.process.wait(60) == 0


def read_to_the_end(call: Any) -> Iterator[Any]:
    with suppress(grpc.RpcError):
        yield from call
