"""The door is lost under live streams: our client goes on with them, others hear of it. In the end it is shut."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc
import openai
import pytest
from early_stop import early_stop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_http import post
from serve_process import Served, command_line, wait_for
from thorough import thorough

from motley.client import AsyncClient, Client
from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc

TOKENS = 2000
ROUNDS = 4  # one is enough, unless some have ended too soon
SEVERAL = 2
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1, "presence_penalty": 0.5, "logprobs": 1},
    {"temperature": 1.0, "seed": 2, "n": 3, "min_tokens": 50},  # and a stop, found when the service runs
    {"temperature": 1.0},  # no seed: the door draws one, and tells it with its first message
]


class Heard:
    """The output that a client receives of its choices, and of all together.

    cut  each time it asked again: choices that had ended, tokens so far
    """

    def __init__(self) -> None:
        self.choices: dict[int, list[Any]] = {}
        self.seeds: list[int] = []
        self.usages: list[int] = []
        self.asked = False
        self.cut: list[tuple[int, int]] = []

    @property
    def ended(self) -> int:
        return sum(bool(choice[3]) for choice in [*self.choices.values()])

    def asking(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A stub's method that notes what it is asked to continue."""

        def send(request: pb.CompleteRequest, **options: Any) -> Any:
            if self.asked:
                self.cut.append((self.ended, sum(len(ids.ids) for ids in request.output_ids)))
            self.asked = True
            return method(request, **options)

        return send

    def add(self, chunk: Any) -> None:
        """A chunk, or an answer in one piece."""
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


def blocking(service: Served, number: int, heard: Heard, **more: Any) -> None:
    with Client(service.grpc) as client:
        client.stub.CompleteStream = heard.asking(client.stub.CompleteStream)
        for chunk in client.stream(f"Once {number}", **(options(number) | more)):
            heard.add(chunk)


def asynchronous(service: Served, number: int, heard: Heard, **more: Any) -> None:
    async def read() -> None:
        async with AsyncClient(service.grpc) as client:
            client.stub.CompleteStream = heard.asking(client.stub.CompleteStream)
            async for chunk in client.stream(f"Once {number}", **(options(number) | more)):
                heard.add(chunk)

    asyncio.run(read())


def whole(service: Served, number: int, heard: Heard, **more: Any) -> None:
    with Client(service.grpc) as client:
        client.stub.Complete = heard.asking(client.stub.Complete)
        heard.add(client.complete(f"Once {number}", **(options(number) | more)))


Call = tuple[Callable[..., None], int]
CALLS: list[Call] = [
    (whole, 0),
    *((blocking, number) for number in range(len(SAMPLING))),
    (asynchronous, 1),
    (asynchronous, SEVERAL),
]


def over_http(service: Served, begun: threading.Event, tokens: int = 20 * TOKENS) -> int:
    """How many chunks came, if they ended well. By default it would take so long that it is always cut."""
    count = 0
    with openai.OpenAI(base_url=f"{service.http}/v1", api_key="none", max_retries=0) as client:
        known = {"temperature": 0.0, "max_tokens": tokens, "extra_body": {"ignore_eos": True}}
        for _ in client.completions.create(model="tiny", prompt="Once 0", stream=True, **known):
            count += 1
            begun.set()
    return count


def lose(service: Served, calls: dict[Call, Heard], how: signal.Signals, stop: str) -> None:
    """The ingress, in the middle of all that these are to hear; they hear the rest of it."""
    begun = threading.Event()

    def ready() -> bool:
        """Each has begun, and one choice has ended where there are several; or one has heard all: no use in waiting."""
        streams = {call: heard for call, heard in calls.items() if call[0] is not whole}
        begun = all(one.ended if number == SEVERAL else one.choices for (_, number), one in streams.items())
        return begun or any(future.done() for future in futures)

    with ThreadPoolExecutor(len(calls) + 1) as threads:
        foreign = threads.submit(over_http, service, begun)
        assert begun.wait(60), "a stream that cannot be resumed"
        futures = []
        for (call, number), heard in calls.items():
            future = threads.submit(call, service, number, heard, **stops(number, stop))
            futures.append(future)
            if call is whole:  # of which nothing is heard before its end
                wait_for(lambda one=future: service.load()["running"] == 2 or one.done(), "it to be computed")
        wait_for(ready, "streams")
        [pid] = [pid for pid in service.replicas() if ":ingress" in command_line(pid)]
        os.kill(pid, how)
        for future in futures:
            future.result(120)
    with pytest.raises(openai.APIConnectionError):  # cannot be resumed, but must not look as if it had ended well
        foreign.result()
    service.wait_idle()


def stops(number: int, stop: str) -> dict[str, Any]:
    return {"stop": [stop]} if number == SEVERAL else {}


def was_cut(call: Call, heard: Heard) -> bool:
    """In the middle of a stream; of several choices one had ended then, and others had not."""
    begun = [ended for ended, num_tokens in heard.cut if num_tokens or call[0] is whole]
    return any(call[1] != SEVERAL or 0 < ended < 3 for ended in begun)


@pytest.mark.parametrize("how", [signal.SIGKILL, *thorough(signal.SIGSTOP)])
def test_the_ingress_is_lost(pair: Served, how: signal.Signals) -> None:
    """Killed, it is heard of at once; when it hangs, as soon as Serve has ended it."""
    stop = early_stop(pair, f"Once {SEVERAL}", **options(SEVERAL))
    left = CALLS
    for _ in range(ROUNDS):
        heards = {call: Heard() for call in left}
        lose(pair, heards, how, stop)
        check(pair, heards, stop)
        left = [call for call in left if not was_cut(call, heards[call])]
        if not left:
            break
    assert not left, "were never cut"


def check(service: Served, heards: dict[Call, Heard], stop: str) -> None:
    """They have heard what they would have, and each end once."""
    assert all(len(heard.seeds) == len(heard.usages) == 1 for heard in heards.values())
    unbroken = {(number, heard.seeds[0]): Heard() for (_, number), heard in heards.items()}
    with ThreadPoolExecutor(len(unbroken)) as threads:
        for (number, seed), heard in unbroken.items():
            threads.submit(blocking, service, number, heard, seed=seed, **stops(number, stop))
    for (call, number), heard in heards.items():
        assert heard.same(unbroken[number, heard.seeds[0]]), f"{call.__name__} {SAMPLING[number]}"
        if number == SEVERAL:
            ends = {reason for _, _, _, [(reason, _)] in heard.choices.values()}
            assert ends == {pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH}


def lose_ingress(service: Served, mark: str, tokens: int, theirs: int) -> tuple[Future[int], Heard]:
    """Kill the process of this mark under a stream of so many tokens of ours and of another; return what both met.

    Beside an HAProxy that takes a change of replicas up there is for a while the one before it: both are lost.
    """
    begun, heard = threading.Event(), Heard()
    with ThreadPoolExecutor(2) as threads:
        foreign = threads.submit(over_http, service, begun, theirs)
        ours = threads.submit(blocking, service, 0, heard, max_tokens=tokens)
        assert begun.wait(60), "a stream"
        wait_for(lambda: heard.choices, "ours")
        lost = [pid for pid in service.descendants() if mark in command_line(pid)]
        assert lost
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        ours.result(120)
        wait_for(lambda: [new for new in service.descendants() if mark in command_line(new)], "another")
    unbroken = Heard()
    blocking(service, 0, unbroken, max_tokens=tokens)
    assert heard.same(unbroken)
    return foreign, heard


def test_haproxys_manager_is_lost(pair: Served) -> None:
    """Nobody notices: HAProxy goes on, until the next manager takes over from it."""
    foreign, heard = lose_ingress(pair, "ray::HAProxyManager", TOKENS, TOKENS)
    assert foreign.result() > 0
    assert not heard.cut


@pytest.mark.thorough
def test_haproxy_is_lost(pair: Served) -> None:
    """It is there again before our client gives up; others hear of it."""
    foreign, heard = lose_ingress(pair, "/bin/haproxy ", 5 * TOKENS, 20 * TOKENS)
    with pytest.raises(openai.APIConnectionError):
        foreign.result()
    assert heard.cut


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
        assert [response.status for response in watch] == [health_pb2.HealthCheckResponse.NOT_SERVING]
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
