"""From a replica's messages to answers: log-probabilities, ends, failures before and in a stream."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import asgi
import grpc
import pytest
from local_ingress import make_ingress
from scripted_worker import ScriptedWorker

from motley.cluster.protos import inference_pb2 as pb
from motley.replicas.errors import DeadlineExceeded, EngineFault, Overloaded, Unavailable
from motley.replicas.types import Delta, FinishReason, StreamMessage, TokenLogprob

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


class Scripted:
    """An ingress before a worker that follows a script."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def __call__(self, messages: Sequence[StreamMessage], error: Exception | None = None) -> Any:
        self.worker = ScriptedWorker(str(self._folder), messages, error)
        self.ingress = await make_ingress(self._folder, self.worker)
        return partial(asgi.request, self.ingress.__serve_build_asgi_app__(), "POST")


@pytest.fixture
def scripted(folder: Path) -> Scripted:
    return Scripted(folder)


def message(*deltas: Delta, **fields: Any) -> StreamMessage:
    return StreamMessage(tuple(deltas), **fields)


def ids(scripted: Scripted, text: str) -> tuple[int, ...]:
    return tuple(scripted.ingress.admitter.tokenizer.encode(text))


BEGIN = message(cached_tokens=2)
WHOLE = [BEGIN, message(Delta(0, (65, 66), "bc")), message(Delta(0, (67,), "d", None, STOP, "x"))]


async def test_usage_counts_cached_tokens_and_every_output_token(scripted: Scripted) -> None:
    post = await scripted(WHOLE)
    for path, body in ((COMPLETIONS, {"prompt": "abc"}), (CHAT, {"messages": HELLO})):
        answer = (await post(path, body)).json()
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
        assert answer["usage"]["completion_tokens"] == 3
        assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("stop", "x")


async def test_one_event_carries_all_that_was_ready(scripted: Scripted) -> None:
    post = await scripted(WHOLE)
    reply = await post(COMPLETIONS, {"prompt": "abc", "stream": True})
    assert [event["choices"][0]["text"] for event in reply.events()[:-1]] == ["bc", "d"]


LOGPROBS = (TokenLogprob(65, -0.5, ((65, -0.5), (66, -1.5))), TokenLogprob(66, float("-inf"), ((67, -0.25),)))


async def test_logprobs_in_both_of_openais_forms(scripted: Scripted) -> None:
    post = await scripted([message(Delta(0, (65, 66), "bc", LOGPROBS, LENGTH))])
    a, b, c = (scripted.ingress.admitter.tokenizer.token_text(i) for i in (65, 66, 67))
    body = {"prompt": "abc", "logprobs": 2}
    legacy = (await post(COMPLETIONS, body)).json()["choices"][0]["logprobs"]
    assert legacy == {
        "tokens": [a, b],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{a: -0.5, b: -1.5}, {c: -0.25, b: -9999.0}],
        "text_offset": [0, 1],
    }
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    content = (await post(CHAT, body)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [a, b]
    assert content[0]["top_logprobs"][1] == {"token": b, "logprob": -1.5, "bytes": list(b.encode())}
    assert scripted.worker.requests[-1].sampling.logprobs == 2


async def test_echoed_prompts_bring_their_logprobs(scripted: Scripted) -> None:
    post = await scripted([])
    prompt = ids(scripted, "ab")
    script = [
        message(prompt_logprobs=(None, TokenLogprob(prompt[1], -2.0)), cached_tokens=0),
        message(Delta(0, (prompt[0],), "a", (TokenLogprob(prompt[0], -1.0),), LENGTH)),
    ]
    post = await scripted(script)
    body = {"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 1}
    whole = (await post(COMPLETIONS, body)).json()["choices"][0]
    assert whole["text"] == "aba"
    assert whole["logprobs"]["token_logprobs"] == [None, -2.0, -1.0]
    assert whole["logprobs"]["text_offset"] == [0, 1, 2]
    events = (await post(COMPLETIONS, {**body, "stream": True})).events()[:-1]
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert reduce(operator.iadd, (part["token_logprobs"] for part in parts), []) == whole["logprobs"]["token_logprobs"]
    assert reduce(operator.iadd, (part["text_offset"] for part in parts), []) == whole["logprobs"]["text_offset"]
    assert scripted.worker.requests[-1].sampling.prompt_logprobs == 0


NOWHERE = "the replica went away, and no other could take over; try again"
FAILURES = [
    (Overloaded("full", code="queue_full"), 429, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable("gone", code="replica_lost"), 503, grpc.StatusCode.UNAVAILABLE),
    (DeadlineExceeded("late"), 504, grpc.StatusCode.DEADLINE_EXCEEDED),
    (EngineFault("step", code="engine_fault"), 500, grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(("error", "status", "code"), FAILURES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("stream", [False, True])
async def test_failures_before_the_first_token(
    scripted: Scripted, error: Exception, status: int, code: grpc.StatusCode, stream: bool
) -> None:
    post = await scripted([], error)
    reply = await post(COMPLETIONS, {"prompt": "abc", "stream": stream})
    said = NOWHERE if isinstance(error, Unavailable) else str(error)
    assert (reply.status, reply.json()["error"]["message"]) == (status, said)
    assert ("retry-after" in reply.headers) == (status in (429, 503))
    context = Context()
    await scripted.ingress.Complete(pb.CompleteRequest(text="abc"), context)
    assert (context.code, context.details) == (code, said)


async def test_a_failure_in_the_stream_is_its_last_event(scripted: Scripted) -> None:
    post = await scripted(WHOLE[:2], EngineFault("step", code="engine_fault"))
    reply = await post(COMPLETIONS, {"prompt": "abc", "stream": True})
    *_, last = reply.events()
    assert reply.status == 200
    assert last["error"]["code"] == "engine_fault"
    context = Context()
    chunks = [c async for c in scripted.ingress.CompleteStream(pb.CompleteRequest(text="abc"), context)]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert [choice.text for choice in choices] == ["bc", ""]
    assert choices[-1].finish_reason == pb.FINISH_REASON_ERROR
    assert context.code == grpc.StatusCode.INTERNAL


async def test_serves_own_proxy_is_told_by_an_exception(scripted: Scripted) -> None:
    await scripted([], Overloaded("full"))
    context = Context()
    context.forwarded = True
    stream = scripted.ingress.CompleteStream(pb.CompleteRequest(text="abc"), context)
    assert (await anext(stream)).HasField("started")
    with pytest.raises(Overloaded):
        await anext(stream)
    assert context.code == grpc.StatusCode.RESOURCE_EXHAUSTED


ENDS = [
    (FinishReason.DEADLINE, 504, grpc.StatusCode.DEADLINE_EXCEEDED),
    (FinishReason.REPLICA_LOST, 503, grpc.StatusCode.UNAVAILABLE),
]


@pytest.mark.parametrize(("reason", "status", "code"), ENDS, ids=str)
async def test_half_an_answer_is_no_answer(
    scripted: Scripted, reason: FinishReason, status: int, code: grpc.StatusCode
) -> None:
    post = await scripted([BEGIN, message(Delta(0, (65,), "b")), message(Delta(0, (), "", None, reason))])
    assert (await post(COMPLETIONS, {"prompt": "abc"})).status == status
    events = (await post(COMPLETIONS, {"prompt": "abc", "stream": True})).events()
    assert events[-2]["choices"][0]["finish_reason"] == reason
    assert "error" in events[-1]
    context = Context()
    chunks = [c async for c in scripted.ingress.CompleteStream(pb.CompleteRequest(text="abc"), context)]
    assert chunks[-1].choices[0].finish_reason == pb.FinishReason.Value(f"FINISH_REASON_{reason.name}")
    assert context.code == code


@pytest.mark.parametrize("reason", [None, FinishReason.CANCELLED, FinishReason.ERROR], ids=str)
async def test_a_stream_without_a_good_end_is_a_lost_replica(scripted: Scripted, reason: FinishReason | None) -> None:
    """Nobody here has cancelled it, and a fault would have been raised; there is no other replica."""
    post = await scripted([*WHOLE[:2], message(Delta(0, (), "", None, reason))] if reason else WHOLE[:2])
    reply = await post(COMPLETIONS, {"prompt": "abc"})
    assert (reply.status, reply.json()["error"]["code"]) == (503, "replica_lost")
    events = (await post(COMPLETIONS, {"prompt": "abc", "stream": True})).events()
    assert events[-2]["choices"][0]["finish_reason"] == FinishReason.REPLICA_LOST
    assert events[-1]["error"]["code"] == "replica_lost"


async def test_stop_reasons_on_the_wire(scripted: Scripted) -> None:
    await scripted([message(Delta(0, (65,), "b", None, STOP, 65), Delta(1, (66,), "c", None, STOP, "x"))])
    request = pb.CompleteRequest(text="abc", sampling=pb.SamplingParams(n=2))
    answer = await scripted.ingress.Complete(request, Context())
    assert answer.choices[0].WhichOneof("stop_reason") == "stop_token_id"
    assert answer.choices[1].stop_string == "x"


async def test_the_models_own_defaults_hold_where_the_client_is_silent(scripted: Scripted, folder: Path) -> None:
    post = await scripted(WHOLE)
    scripted.ingress.admitter._defaults = {"temperature": 0.6, "top_k": 20}
    await post(COMPLETIONS, {"prompt": "abc", "top_k": 5})
    sampling = scripted.worker.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 5, 1.0)


async def test_prefix_caches_of_two_services_share_nothing(scripted: Scripted) -> None:
    salts = set()
    for _ in range(2):
        post = await scripted(WHOLE)
        await post(COMPLETIONS, {"prompt": "abc"})
        salts.add(scripted.worker.requests[-1].cache_salt)
    assert len(salts) == 2


class Context:
    """The part of RayServegRPCContext that our methods use."""

    forwarded = False
    code: grpc.StatusCode | None = None
    details = ""
    trailing: Sequence[tuple[str, str]] = ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:4711"

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return []

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def trailing_metadata(self) -> Sequence[tuple[str, str]]:
        return self.trailing

    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None:
        self.trailing = metadata
