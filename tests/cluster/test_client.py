"""Our client goes on where a stream broke."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from motley.client import AsyncClient, Client, Resume, aio, blocking, complete_request, retry
from motley.client.silence import SilenceWatchdog
from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc
from motley.cluster.service_errors import Unauthenticated
from motley.replicas.errors import EngineFault, InvalidRequest, MotleyError, NotFound, Overloaded, Unavailable

IDS = list(range(10))


class Breaking(inference_pb2_grpc.InferenceServicer):
    """Streams IDS, with the seed drawn once; breaks after so many ids, as often as it is told to."""

    def __init__(self, breaks_after: list[int], code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        self.breaks_after, self.code = breaks_after, code
        self.requests: list[pb.CompleteRequest] = []

    async def CompleteStream(self, request: pb.CompleteRequest, context: Any) -> AsyncIterator[pb.CompletionChunk]:
        self.requests.append(request)
        seed = request.sampling.seed if request.sampling.HasField("seed") else 77
        begin = len(request.output_ids[0].ids) if request.output_ids else 0
        end = self.breaks_after.pop(0) if self.breaks_after else None
        yield pb.CompletionChunk(started=pb.Started(seed=seed))
        for token in IDS[begin:end]:
            yield pb.CompletionChunk(choices=[pb.Choice(token_ids=[token], text=str(token))])
        if end is not None:
            await context.abort(self.code, "broken")
        yield pb.CompletionChunk(usage=pb.Usage(completion_tokens=len(IDS)))


async def serve(servicer: inference_pb2_grpc.InferenceServicer) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


FIRST_WAIT_S = retry.FIRST_WAIT_S


def test_attempts_last_until_a_lost_haproxy_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """For which the door may be shut for 3 s; refused connections tell nothing of when to come again."""
    monkeypatch.setattr(retry, "FIRST_WAIT_S", FIRST_WAIT_S)
    for _ in range(20):
        attempts = retry.CallRetries(3, None)
        assert sum(attempts.after(Unavailable("gone")) for _ in range(3)) > 3.5
    with pytest.raises(Unavailable):
        attempts.after(Unavailable("gone"))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.01)


@pytest.mark.parametrize("breaks_after", [[], [4], [0, 3, 10]])
async def test_nothing_is_lost_and_nothing_comes_twice(breaks_after: list[int]) -> None:
    servicer = Breaking(list(breaks_after))
    server, target = await serve(servicer)
    async with AsyncClient(target) as client:
        chunks = [chunk async for chunk in client.stream("abc", top_k=5)]
    await server.stop(None)
    assert [i for chunk in chunks for choice in chunk.choices for i in choice.token_ids] == IDS
    assert [chunk.HasField("started") for chunk in chunks].count(True) == 1
    assert chunks[-1].usage.completion_tokens == len(IDS)
    assert [request.sampling.top_k for request in servicer.requests] == [5] * (len(breaks_after) + 1)
    assert all(request.sampling.seed == 77 for request in servicer.requests[1:])


@pytest.mark.parametrize(
    ("breaks_after", "code", "raised"),
    [
        ([2, 2, 2, 2, 2], grpc.StatusCode.UNAVAILABLE, Unavailable),  # no further from attempt to attempt
        ([1], grpc.StatusCode.INTERNAL, EngineFault),
        ([1], grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),  # too large a message, say: nothing says when to retry
    ],
)
async def test_what_cannot_help_is_raised(
    breaks_after: list[int], code: grpc.StatusCode, raised: type[MotleyError]
) -> None:
    servicer = Breaking(breaks_after, code)
    server, target = await serve(servicer)
    async with AsyncClient(target) as client:
        with pytest.raises(raised, match="broken") as caught:
            [chunk async for chunk in client.stream("abc")]
    await server.stop(None)
    assert isinstance(caught.value.__cause__, grpc.RpcError)
    assert len(servicer.requests) == (4 if raised is Unavailable else 1)


def test_a_service_that_is_not_there_is_unavailable() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(Unavailable):
        list(client.stream("abc"))


class Refusing(inference_pb2_grpc.InferenceServicer):
    """Refuses `times` calls with a code, perhaps saying when to try again; then answers."""

    slow_s = 0.0

    def __init__(self, times: int, code: grpc.StatusCode, message: str, retry_after: str | None) -> None:
        self.left, self.code, self.message, self.retry_after = times, code, message, retry_after
        self.metadata: list[dict[str, Any]] = []
        self.remaining: list[float | None] = []

    async def Complete(self, request: pb.CompleteRequest, context: Any) -> pb.Completion:
        self.metadata.append(dict(context.invocation_metadata()))
        self.remaining.append(context.time_remaining())
        if self.left:
            self.left -= 1
            await asyncio.sleep(self.slow_s)
            trailing = (("retry-after", self.retry_after),) if self.retry_after else ()
            await context.abort(self.code, self.message, trailing)
        return pb.Completion(choices=[pb.Choice(text=request.text)])


BUSY = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")


@pytest.mark.parametrize("refusal", [(*BUSY, "0"), (grpc.StatusCode.UNAVAILABLE, "starting", None)])
async def test_a_refusal_that_may_pass_is_asked_again(refusal: Any) -> None:
    servicer = Refusing(2, *refusal)
    servicer.slow_s = 0.6
    server, target = await serve(servicer)
    async with AsyncClient(target, api_key="sesame") as client:
        assert (await client.complete("abc", timeout_s=8.0)).choices[0].text == "abc"
    await server.stop(None)
    assert [sent["authorization"] for sent in servicer.metadata] == ["Bearer sesame"] * 3
    assert servicer.remaining[2] < 7.5, "one deadline for all attempts; gRPC rounds it up to a second"


@pytest.mark.parametrize(
    ("refusal", "raised"),
    [
        ((*BUSY, "30"), Overloaded),  # longer than anyone waits unasked
        ((*BUSY, None), Overloaded),
        ((grpc.StatusCode.INVALID_ARGUMENT, "top_p: 7 is not accepted", None), InvalidRequest),
        ((grpc.StatusCode.UNAUTHENTICATED, "no key", None), Unauthenticated),
        ((grpc.StatusCode.NOT_FOUND, "model: 'x' is not served here", None), NotFound),
    ],
)
async def test_a_refusal_for_good_is_raised_at_once(refusal: Any, raised: type[MotleyError]) -> None:
    servicer = Refusing(1, *refusal)
    server, target = await serve(servicer)
    async with AsyncClient(target) as client:
        with pytest.raises(raised) as caught:
            await client.complete("abc")
    await server.stop(None)
    assert caught.value.param == {InvalidRequest: "top_p", NotFound: "model"}.get(raised)
    assert len(servicer.metadata) == 1


async def test_no_wait_goes_beyond_the_callers_time() -> None:
    servicer = Refusing(9, *BUSY, "5")
    server, target = await serve(servicer)
    async with AsyncClient(target) as client:
        with pytest.raises(Overloaded):
            await client.complete("abc", timeout_s=4.0)
    await server.stop(None)
    assert len(servicer.metadata) == 1


class Endless(inference_pb2_grpc.InferenceServicer):
    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def ChatStream(self, request: pb.ChatRequest, context: Any) -> AsyncIterator[pb.CompletionChunk]:
        try:
            while True:
                yield pb.CompletionChunk(choices=[pb.Choice(text="more")])
                await asyncio.sleep(0.01)
        finally:
            self.cancelled.set()


async def test_leaving_a_stream_cancels_it() -> None:
    servicer = Endless()
    server, target = await serve(servicer)

    def read() -> None:
        with Client(target) as client, client.chat_stream([{"role": "user", "content": "Hi"}]) as chunks:
            assert next(chunks).choices[0].text == "more"

    await asyncio.to_thread(read)
    await asyncio.wait_for(servicer.cancelled.wait(), 10)
    servicer.cancelled.clear()
    async with AsyncClient(target) as client, client.chat_stream([("user", "Hi")]) as chunks:
        await anext(chunks)
    await asyncio.wait_for(servicer.cancelled.wait(), 10)
    await server.stop(None)


def test_options_go_where_they_belong() -> None:
    request = complete_request(
        "a", {"model": "m", "stop": "x", "timeout_s": 2.0, "priority": 3, "logit_bias": {5: 1.0}}
    )
    assert (request.model, request.timeout_s, request.priority) == ("m", 2.0, 3)
    assert list(request.sampling.stop) == ["x"]
    assert dict(request.sampling.logit_bias) == {5: 1.0}


def test_a_choice_that_ended_does_not_end_again() -> None:
    resume = Resume(complete_request([1, 2], {"n": 2}))
    resume.take(pb.CompletionChunk(started=pb.Started(seed=9)))
    end = pb.Choice(index=0, token_ids=[5], finish_reason=pb.FINISH_REASON_STOP)
    assert resume.take(pb.CompletionChunk(choices=[end, pb.Choice(index=1, token_ids=[6])]))
    assert [list(ids.ids) for ids in resume.rest().output_ids] == [[5], [6]]
    again = pb.CompletionChunk(choices=[pb.Choice(index=0, finish_reason=pb.FINISH_REASON_STOP)])
    assert resume.take(again) == []
    [last] = resume.take(pb.CompletionChunk(usage=pb.Usage(completion_tokens=0)))
    assert last.usage.completion_tokens == 2


@pytest.mark.parametrize("own", ["", "mine"])
def test_asks_for_the_rest_by_the_id_of_the_first_message(own: str) -> None:
    """But for one that the caller gave."""
    resume = Resume(complete_request([1, 2], {"request_id": own} if own else {}))
    for number, name in enumerate(("first", "second")):
        resume.take(pb.CompletionChunk(started=pb.Started(seed=9 + number, request_id=name)))
        assert resume.rest().request_id == (own or "first")


def test_several_choices_are_followed_each() -> None:
    resume = Resume(complete_request([1, 2], {"n": 2}))
    taken = list(follow(resume, [(0, [5]), (1, [6, 7]), (0, [8])]))
    assert len(taken) == 4
    assert [list(ids.ids) for ids in resume.rest().output_ids] == [[5, 8], [6, 7]]
    assert (resume.request.sampling.seed, resume.request.sampling.n) == (9, 2)


def follow(resume: Resume, deltas: list[tuple[int, list[int]]]) -> Iterator[pb.CompletionChunk]:
    yield from resume.take(pb.CompletionChunk(started=pb.Started(seed=9)))
    for index, ids in deltas:
        yield from resume.take(pb.CompletionChunk(choices=[pb.Choice(index=index, token_ids=ids)]))


def test_a_lost_replica_is_no_end_of_a_choice() -> None:
    resume = Resume(complete_request("abc", {}))
    [begun] = resume.take(pb.CompletionChunk(started=pb.Started(seed=9), choices=[pb.Choice(token_ids=[5])]))
    assert len(begun.choices) == 1
    assert resume.take(pb.CompletionChunk(choices=[pb.Choice(finish_reason=pb.FINISH_REASON_REPLICA_LOST)])) == []
    assert [list(ids.ids) for ids in resume.rest().output_ids] == [[5]]
    [rest] = resume.take(pb.CompletionChunk(choices=[pb.Choice(token_ids=[6], finish_reason=pb.FINISH_REASON_STOP)]))
    assert rest.choices[0].finish_reason == pb.FINISH_REASON_STOP


@pytest.mark.parametrize(("details", "kind"), [("RST_STREAM with error code 8", Unavailable), ("", MotleyError)])
def test_a_stream_that_is_reset_means_that_the_service_is_gone(details: str, kind: type[MotleyError]) -> None:
    class Reset(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.CANCELLED

        def details(self) -> str:
            return details

        def trailing_metadata(self) -> None:
            return None

    assert type(retry.error_from_call(Reset())) is kind


class Stopped(Breaking):
    """Falls silent after so many ids, as often as it is told to, and answers nothing while it is stopped."""

    def __init__(self, silent_after: list[int], *, lives: bool = False) -> None:
        super().__init__([])
        self.silent_after, self.lives = silent_after, lives
        self.asked = 0
        self.left = asyncio.Event()  # a client has given up a silent stream
        self.goes_on = asyncio.Event()

    async def CompleteStream(self, request: pb.CompleteRequest, context: Any) -> AsyncIterator[pb.CompletionChunk]:
        silent_after = self.silent_after.pop(0) if self.silent_after else None
        count = 0
        async for chunk in super().CompleteStream(request, context):
            if count == silent_after:
                try:
                    await self.goes_on.wait()
                finally:
                    self.left.set()
            yield chunk
            count += len(chunk.choices)

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.Model:
        self.asked += 1
        if self.lives:
            if self.asked >= 3:
                self.goes_on.set()
            return pb.Model(name="fake")
        await asyncio.Event().wait()
        raise AssertionError


SILENCE_S = 0.2


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for client in (aio, blocking):
        monkeypatch.setattr(client, "PROBE_S", 0.2)


def ids_of(chunks: list[pb.CompletionChunk]) -> list[int]:
    return [i for chunk in chunks for choice in chunk.choices for i in choice.token_ids]


async def read_all(target: str, kind: str, *, silence_s: float | None = SILENCE_S) -> list[pb.CompletionChunk]:
    def read() -> list[pb.CompletionChunk]:
        with Client(target, silence_s=silence_s) as client:
            return list(client.stream("abc"))

    if kind == "blocking":
        return await asyncio.to_thread(read)
    async with AsyncClient(target, silence_s=silence_s) as client:
        return [chunk async for chunk in client.stream("abc")]


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("kind", ["blocking", "asynchronous"])
async def test_a_stream_of_a_service_that_is_stopped_is_asked_for_again(kind: str) -> None:
    """The service behaves as after SIGSTOP: no connection breaks, and nothing is answered."""
    servicer = Stopped([4, 2])
    server, target = await serve(servicer)
    chunks = await asyncio.wait_for(read_all(target, kind), 60)
    assert ids_of(chunks) == IDS
    assert len(servicer.requests) == 3
    assert [len(request.output_ids[0].ids) for request in servicer.requests[1:]] == [4, 6]
    assert servicer.left.is_set(), "what was given up is cancelled: a service that goes on again need not finish it"
    await server.stop(None)


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("kind", ["blocking", "asynchronous"])
async def test_a_stream_that_waits_its_turn_is_not_asked_for_again(kind: str) -> None:
    servicer = Stopped([4], lives=True)
    server, target = await serve(servicer)
    chunks = await asyncio.wait_for(read_all(target, kind), 60)
    assert ids_of(chunks) == IDS
    assert servicer.asked >= 3, "for each time that it was silent for long"
    assert len(servicer.requests) == 1
    await server.stop(None)


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("kind", ["blocking", "asynchronous"])
async def test_a_service_that_stays_silent_is_unavailable(kind: str) -> None:
    servicer = Stopped([4] + [0] * 9)
    server, target = await serve(servicer)
    with pytest.raises(Unavailable, match="silent"):
        await asyncio.wait_for(read_all(target, kind), 60)
    assert len(servicer.requests) == 4
    await server.stop(None)


@pytest.mark.usefixtures("_soon")
async def test_whoever_is_cancelled_while_it_is_silent_is_cancelled() -> None:
    servicer = Stopped([4])
    server, target = await serve(servicer)
    task = asyncio.create_task(read_all(target, "asynchronous", silence_s=None))
    async with asyncio.timeout(30):
        while not servicer.requests:
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await server.stop(None)


def test_a_watch_ends_with_its_last_stream() -> None:
    watch = SilenceWatchdog(0.05, lambda: None)
    with watch.over(None):
        thread = watch._thread
        assert thread is not None
    thread.join(20)
    assert not thread.is_alive()
    with watch.over(None):
        assert watch._thread not in (None, thread), "and another begins with the next"


FAR = 2**40
UNFIT: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("complete", ("a",), {"temperature": "a"}, "temperature"),
    ("complete", ("a",), {"temperature": 10**400}, "temperature"),
    ("complete", ("a",), {"temprature": 1.0}, "temprature"),
    ("complete", ("a",), {"seed": 2**64}, "seed"),
    ("complete", ("a",), {"n": 1.0}, "n"),
    ("complete", ("a",), {"n": True, "top_k": 3}, "n"),
    ("complete", ("a",), {"logit_bias": {FAR: 1.0}}, "logit_bias"),
    ("complete", ("a",), {"stop": ["a", 5]}, "stop"),
    ("complete", ("a",), {"grammar": "a"}, "grammar"),
    ("complete", ("a",), {"priority": "high"}, "priority"),
    ("complete", ("a",), {"timeout_s": "2"}, "timeout_s"),
    ("complete", ("\ud800",), {}, "prompt"),
    ("complete", ([1, FAR],), {}, "prompt"),
    ("complete", (iter([1, FAR]),), {}, "prompt"),
    ("complete", (b"abc",), {}, "prompt"),
    ("complete", (7,), {}, "prompt"),
    ("stream", ([1, FAR],), {}, "prompt"),
    ("chat", ([("user", "a"), ("user", "\ud800")],), {}, "messages[1].content"),
    ("chat", ([{"role": "user", "contnt": "a"}],), {}, "messages[0].contnt"),
    ("chat", ("abc",), {}, "messages[0]"),
    ("chat", (5,), {}, "messages"),
    ("chat", ([("user", "a")],), {"template_arguments": {"x": 5}}, "template_arguments.x"),
    ("chat", ([("user", "a")],), {"tools": [{"function": {"name": 5}}]}, "tools[0].function.name"),
    ("chat", ([("user", "a")],), {"tools": [{"type": "x"}]}, "tools[0]"),
    ("chat", ([("user", "a")],), {"tool_choice": "maybe"}, "tool_choice"),
    ("chat", ([("user", "a")],), {"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ("chat_stream", ([("user", "a")],), {"reasoning_effort": 5}, "reasoning_effort"),
    ("embed", (["a"],), {"pooling": "max"}, "pooling"),
    ("embed", (["a"],), {"pooling": []}, "pooling"),
    ("embed", (["a", [FAR]],), {}, "inputs[1]"),
    ("embed", (5,), {}, "inputs"),
    ("embed", (["a"],), {"normalize": "no"}, "normalize"),
    ("tokenize", (5,), {}, "text"),
    ("detokenize", ([FAR],), {}, "token_ids"),
]


@pytest.mark.parametrize(("call", "given", "options", "param"), UNFIT, ids=[f"{row[0]}-{row[3]}" for row in UNFIT])
async def test_what_cannot_be_sent_is_refused_as_the_service_would(
    call: str, given: tuple[Any, ...], options: dict[str, Any], param: str
) -> None:
    """Nobody listens there: it is refused before anything is sent."""
    with Client("127.0.0.1:1", retries=0) as client, pytest.raises(InvalidRequest) as caught:
        getattr(client, call)(*copy.deepcopy(given), **options)
    assert (caught.value.param, caught.value.message.startswith(f"{param}: ")) == (param, True)
    async with AsyncClient("127.0.0.1:1", retries=0) as asking:
        with pytest.raises(InvalidRequest) as caught:
            await getattr(asking, call)(*given, **options)
    assert caught.value.param == param
