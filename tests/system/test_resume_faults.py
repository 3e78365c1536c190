"""Replicas that are killed, hang or are taken away under live streams, over both protocols: nobody notices."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import openai
import pytest
from early_stop import early_stop
from serve_process import Served, alive, wait_for

from motley.client import Client, complete_request
from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc

FULL = 8  # sequences that a replica of the pair runs at a time
CROWD = 8 * FULL  # so many that the wait for them is longer than any error of a prediction
ROUNDS = 6  # two are enough for the table, unless some end too soon
STREAMS = 16  # more than one replica runs at a time
SEVERAL = "several, some ended"
LONG_PROMPT = 16_000  # so that it is still computed when others have come
TOKENS = 2000  # long enough to be cut in the middle
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True},
    "seeded": {"temperature": 1.0, "seed": 1, "max_tokens": TOKENS, "ignore_eos": True},
    "penalties": {
        "temperature": 0.8, "seed": 2, "presence_penalty": 0.7, "frequency_penalty": 0.1, "repetition_penalty": 1.1,
        "max_tokens": TOKENS, "ignore_eos": True,
    },
    "logprobs": {"temperature": 1.0, "seed": 3, "logprobs": 2, "max_tokens": TOKENS // 2, "ignore_eos": True},
    SEVERAL: {  # and a stop that is found when the service runs
        "temperature": 1.0, "seed": 4, "n": 3, "max_tokens": TOKENS, "min_tokens": 60, "ignore_eos": True,
    },
}  # fmt: skip

LONG = {"temperature": 1.0, "seed": 8, "max_tokens": 5 * TOKENS, "ignore_eos": True}  # still runs when all is decided


@dataclass
class Told:
    """All that a client learns of one choice."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)


@dataclass
class Answer:
    """request_id: by which the ingress's log names it."""

    choices: dict[int, Told] = field(default_factory=dict)
    usages: list[int] = field(default_factory=list)
    request_id: str = field(default="", compare=False)

    def of(self, index: int) -> Told:
        return self.choices.setdefault(index, Told())

    @property
    def ended(self) -> int:
        """How many of its choices have."""
        return sum(bool(reported.ends) for reported in [*self.choices.values()])


def over_grpc(service: Served, name: str, reply: Answer) -> Answer:
    with Client(service.grpc, retries=0) as client:  # that it goes on is the service's doing
        for chunk in client.stream(f"Once {name}", **SAMPLING[name]):
            reply.request_id = reply.request_id or chunk.started.request_id
            for choice in chunk.choices:
                reported = reply.of(choice.index)
                reported.text += choice.text
                reported.ids += choice.token_ids
                reported.logprobs += [(entry.token_id, entry.logprob, len(entry.top)) for entry in choice.logprobs]
                if choice.finish_reason:
                    reported.ends.append((choice.finish_reason, choice.stop_string))
            if chunk.HasField("usage"):
                reply.usages.append(chunk.usage.completion_tokens)
    return reply


OPENAI_FIELDS = ("temperature", "seed", "presence_penalty", "frequency_penalty", "logprobs", "n", "stop", "max_tokens")


def over_http(service: Served, name: str, reply: Answer) -> Answer:
    known = {key: value for key, value in SAMPLING[name].items() if key in OPENAI_FIELDS}
    extra = {key: value for key, value in SAMPLING[name].items() if key not in OPENAI_FIELDS}
    options = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": extra}
    for chunk in openai_client(service.http).completions.create(
        model="tiny", prompt=f"Once {name}", **known, **options
    ):
        reply.request_id = openai_id(chunk)
        for choice in chunk.choices:
            reported = reply.of(choice.index)
            reported.text += choice.text
            if choice.logprobs is not None:
                reported.logprobs += zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)
            if choice.finish_reason is not None:
                reported.ends.append(choice.finish_reason)
        if chunk.usage is not None:
            reply.usages.append(chunk.usage.completion_tokens)
    return reply


def openai_id(reply: Any) -> str:
    """Return the id that the service uses inside."""
    return str(reply.id).removeprefix("cmpl-")


@cache
def openai_client(base: str) -> openai.OpenAI:
    """One for all: making one takes so long that streams which began first would end before the last begins."""
    return openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)


Stream = tuple[Callable[[Served, str, Answer], Answer], str]
TABLE: list[Stream] = [(reader, name) for name in SAMPLING for reader in (over_grpc, over_http)]


@pytest.fixture(scope="module")
def unbroken(pair: Served) -> dict[Stream, Answer]:
    stop = early_stop(pair, f"Once {SEVERAL}", **SAMPLING[SEVERAL])
    SAMPLING[SEVERAL]["stop"] = [stop]
    with ThreadPoolExecutor(len(TABLE)) as threads:
        responses = dict(zip(TABLE, threads.map(lambda one: one[0](pair, one[1], Answer()), TABLE), strict=True))
    assert all(len(reported.ends) == 1 for reply in responses.values() for reported in reply.choices.values())
    assert all(len(reply.usages) == 1 for reply in responses.values())
    grpc_ends = {reported.ends[0] for reported in responses[over_grpc, SEVERAL].choices.values()}
    assert grpc_ends == {(pb.FINISH_REASON_STOP, stop), (pb.FINISH_REASON_LENGTH, "")}, "they end at different times"
    assert {reported.ends[0] for reported in responses[over_http, SEVERAL].choices.values()} == {"stop", "length"}
    return responses


@pytest.fixture(autouse=True)
def both(pair: Served) -> None:
    """Serve may call one ready while the other still starts: what is killed must be what carries streams."""
    wait_for(lambda: states(pair) == ["RUNNING"] * 2 and known(pair) == 2, "two replicas", 240)


class Replica(NamedTuple):
    """A replica with an engine. name: Serve's, as the ingress's log has it too."""

    name: str
    pid: int


def pool(service: Served) -> list[Replica]:
    """In the order of their names, which `carried` has as well."""
    return sorted(Replica(str(replica["replica_id"]), int(replica["pid"])) for replica in of_pool(service))


@contextmanager
def under_way(service: Served, prompt: str, **options: Any) -> Iterator[None]:
    """A request that nobody looks at, until this is left."""
    with grpc.insecure_channel(service.grpc) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Complete.future(complete_request(prompt, options))
        try:
            yield
        finally:
            call.cancel()


@contextmanager
def crowded(service: Served) -> Iterator[Replica]:
    """One of the two is full, and more wait there, while this lasts, so that what comes goes to the other: that one."""
    replicas = pool(service)
    with under_way(service, "Full", **LONG, n=CROWD):
        running = wait_for(lambda: max(found := carried(service)) == FULL and found, "one to be full")
        yield replicas[running.index(min(running))]


class Move(NamedTuple):
    """A request that went on elsewhere, after so many tokens, for that replica was lost."""

    request_id: str
    num_tokens: int
    replica: str


_MOVE = re.compile(r"request (\w+) goes on elsewhere after (\d+) tokens: .* \((\w+)\)$", re.MULTILINE)


def moves(service: Served) -> list[Move]:
    """All so far, says the ingress's log."""
    logs = Path(service.endpoints["folder"], "session_latest", "logs").glob("worker-*.err")
    return [Move(name, int(tokens), lost) for log in logs for name, tokens, lost in _MOVE.findall(log.read_text())]


def resumed(service: Served) -> int:
    """How many times a stream has gone on on another replica."""
    return sum(move.num_tokens > 0 for move in moves(service))


def lost_with(service: Served, victim: Replica, *, begun: bool) -> set[str]:
    """Requests that were there and went on elsewhere: with some of the answer, or before anything of it had come."""
    return {one.request_id for one in moves(service) if one.replica == victim.name and (one.num_tokens > 0) == begun}


def fitting(left: list[Stream]) -> list[Stream]:
    """The first of them, as many as a replica runs at a time."""
    sequences = accumulate(SAMPLING[name].get("n", 1) for _, name in left)
    return [stream for stream, total in zip(left, sequences, strict=True) if total <= FULL]


def struck(
    service: Served, streams: list[Stream], unbroken: dict[Stream, Answer], how: signal.Signals
) -> tuple[Replica, set[Stream]]:
    """A replica is lost in the middle of these, which nobody notices: which it was, and those that it was lost under.

    They had begun there and went on elsewhere, and of several choices one had ended, and others had not.
    """
    responses = {stream: Answer() for stream in streams}

    def ready() -> bool:
        """Otherwise some are over already: no use in waiting."""
        begun = all(one.ended if name == SEVERAL else one.choices for (_, name), one in responses.items())
        return begun or any(future.done() for future in futures.values())

    with ThreadPoolExecutor(len(streams)) as threads:
        with crowded(service) as victim:
            futures = {
                (reader, name): threads.submit(reader, service, name, reply)
                for (reader, name), reply in responses.items()
            }
            wait_for(ready, "streams")
            partly = {stream for stream, one in responses.items() if 0 < one.ended < len(one.choices)}
            os.kill(victim.pid, how)
        for (reader, name), future in futures.items():
            assert future.result(300) == unbroken[reader, name], f"{name} {reader.__name__}"
    lost = lost_with(service, victim, begun=True)
    went_on = {stream for stream, reply in responses.items() if reply.request_id in lost}
    return victim, {stream for stream in went_on if stream[1] != SEVERAL or stream in partly}


def carried(service: Served) -> list[int]:
    """How many sequences run on each replica that the ingress knows."""
    return [load.num_running_reqs for load in loads(service)]


def loads(service: Served) -> list[vllm_engine_pb2.SchedulerLoad]:
    with grpc.insecure_channel(service.grpc) as channel:
        reply = vllm_engine_pb2_grpc.VllmEngineStub(channel).GetLoads(vllm_engine_pb2.GetLoadsRequest(), timeout=10)
    return [*reply.loads]


def known(service: Served) -> int:
    """How many replicas the ingress has; none while it asks one that is lost."""
    try:
        return len(carried(service))
    except grpc.RpcError:
        return 0


def check_baseline(service: Served, count: int = 2, gone: Replica | None = None) -> None:
    """Check that there are as many replicas as before, and that nothing is left on them."""

    def replaced() -> bool:
        found = of_pool(service)
        old = [replica for replica in found if gone is not None and replica["replica_id"] == gone.name]
        return [replica["state"] for replica in found] == ["RUNNING"] * count and not old

    wait_for(replaced, "a replica in the place of the lost one", 90)
    wait_for(lambda: known(service) == count, "the ingress to hear of it")
    service.wait_idle()


def test_a_replica_is_killed(pair: Served, unbroken: dict[Stream, Answer]) -> None:
    """Under every stream of the table."""
    left = TABLE
    for _ in range(ROUNDS):
        victim, moved = struck(pair, fitting(left), unbroken, signal.SIGKILL)
        check_baseline(pair, gone=victim)
        left = [stream for stream in left if stream not in moved]
        if not left:
            break
    assert not left, "they were never on a replica that was killed"


@pytest.mark.thorough
def test_a_replica_hangs(pair: Served, unbroken: dict[Stream, Answer]) -> None:
    """Under every stream of the table. Serve puts another in its place, unless it goes on before that, as the first."""
    left = TABLE
    for number in range(ROUNDS):
        victim, moved = struck(pair, fitting(left), unbroken, signal.SIGSTOP)
        if number == 0:
            go_on(victim)
            check_baseline(pair)
        else:
            wait_for(lambda pid=victim.pid: not alive([pid]), "the hung replica to be removed", 90)
            check_baseline(pair, gone=victim)
        left = [stream for stream in left if stream not in moved]
        if not left:
            break
    assert not left, "they were never on a replica that hung"


def go_on(hung: Replica) -> None:
    with suppress(ProcessLookupError):  # Serve has seen it
        os.kill(hung.pid, signal.SIGCONT)


@pytest.mark.thorough
def test_replicas_are_taken_away_and_added(pair: Served) -> None:
    """Streams of the one that goes end there within --drain-s, or move."""
    with Client(pair.grpc) as client:
        whole = client.complete("Long", **LONG).choices[0]
    before = resumed(pair)
    for _ in range(4):  # until one of them had to move: they may have ended a moment before
        with ThreadPoolExecutor(STREAMS) as threads:
            futures = []
            while min(carried(pair)) == 0:  # one alone may be the soonest until it is full
                assert len(futures) < STREAMS, "both carry some"
                begun = threading.Event()
                futures.append(threads.submit(stream_long, pair, begun))
                assert begun.wait(60)
            scale(pair, 1)
            assert {future.result(300) for future in futures} == {(whole.text, tuple(whole.token_ids))}
        check_baseline(pair, 1)
        scale(pair, 2)
        check_baseline(pair)
        if resumed(pair) > before:
            break
    assert resumed(pair) > before


def stream_long(service: Served, begun: threading.Event) -> tuple[str, tuple[int, ...]]:
    text, ids = "", []
    with Client(service.grpc, retries=0) as client:
        for chunk in client.stream("Long", **LONG):
            begun.set()
            for choice in chunk.choices:
                text += choice.text
                ids += choice.token_ids
    return text, tuple(ids)


def scale(service: Served, count: int) -> None:
    """By Serve's own interface, as operators may where there is no control plane."""
    dashboard(service, "v1/applications/motley/deployments/cpu/scale", {"target_num_replicas": count})


def states(service: Served) -> list[str]:
    """Return what Serve thinks of the replicas with an engine."""
    return [replica["state"] for replica in of_pool(service)]


def of_pool(service: Served) -> list[dict[str, Any]]:
    pool = dashboard(service, "serve/applications/")["applications"]["motley"]["deployments"]["cpu"]
    return list(pool["replicas"])


def dashboard(service: Served, path: str, body: dict[str, int] | None = None) -> Any:
    token = Path("~/.ray/auth_token").expanduser().read_text().strip()
    request = urllib.request.Request(
        f"{service.endpoints['dashboard']}/api/{path}",
        None if body is None else json.dumps(body).encode(),
        {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


@pytest.mark.thorough
def test_a_replica_is_killed_before_the_first_token(pair: Served) -> None:
    """Nobody has seen anything yet: it is tried again, streamed or not, over both protocols; no client retries."""
    left = [*SENDERS]
    for number in range(ROUNDS):
        replicas = pool(pair)
        first, *others = left  # that is computed, and others wait: behind it, or where all is taken
        prompts = {first: str(number) * LONG_PROMPT} | {send: f"{number} {send.__name__}" for send in others}
        with ThreadPoolExecutor(len(left)) as threads:
            with crowded(pair) as roomy:
                futures = {first: threads.submit(first, pair, prompts[first])}
                wait_for(
                    lambda some=futures: pair.load()["queued_prefill_tokens"] or over(some), "a prompt to be computed"
                )
                futures |= {send: threads.submit(send, pair, prompts[send]) for send in others}
                full = [CROWD * (replica != roomy) for replica in replicas]
                wait_for(
                    lambda some=futures, full=full: sum(theirs(pair, full)) == len(some) or over(some), "all to come"
                )
                here = theirs(pair, full)
                victim = replicas[here.index(max(here))]
                os.kill(victim.pid, signal.SIGKILL)
            responses = {send: future.result(300) for send, future in futures.items()}
        check_baseline(pair, gone=victim)
        assert {send: said.text for send, said in responses.items()} == {
            send: send(pair, prompts[send]).text for send in left
        }
        lost = lost_with(pair, victim, begun=False)
        left = [send for send in left if responses[send].request_id not in lost]
        if not left:
            break
    assert not left, "they were never on a replica that was killed"


def theirs(service: Served, full: list[int]) -> list[int]:
    """How many sequences each replica has, that run or wait, beside those that make it full."""
    return [load.num_total_reqs - of for load, of in zip(loads(service), full, strict=True)]


def over(futures: dict[Sender, Future[Said]]) -> bool:
    """Some are, already: no use in waiting."""
    return any(future.done() for future in futures.values())


def test_a_replica_hangs_before_the_first_token(pair: Served) -> None:
    """Nobody has heard of its hanging when they come."""
    left = alone = {send: send(pair, "Late").text for send in SENDERS}
    for _ in range(ROUNDS):
        with ThreadPoolExecutor(len(SENDERS)) as threads:
            with crowded(pair) as victim:
                os.kill(victim.pid, signal.SIGSTOP)
                futures = {send: threads.submit(send, pair, "Late") for send in left}
                wait_for(lambda lost=victim, some=futures: lost_with(pair, lost, begun=False) or over(some), "a move")
            late = {send: future.result(120) for send, future in futures.items()}
        go_on(victim)
        check_baseline(pair)
        assert {send: said.text for send, said in late.items()} == {send: alone[send] for send in late}
        lost = lost_with(pair, victim, begun=False)
        left = {send: text for send, text in left.items() if late[send].request_id not in lost}
        if not left:
            break
    assert not left, "they were never on a replica that hung"


class Said(NamedTuple):
    request_id: str
    text: str


FEW = {"temperature": 0.0, "max_tokens": 8}


def grpc_whole(service: Served, prompt: str) -> Said:
    with Client(service.grpc, retries=0) as client:
        reply = client.complete(prompt, **FEW)
    return Said(reply.started.request_id, reply.choices[0].text)


def grpc_streamed(service: Served, prompt: str) -> Said:
    with Client(service.grpc, retries=0) as client:
        first, *chunks = client.stream(prompt, **FEW)
    return Said(first.started.request_id, "".join(choice.text for chunk in chunks for choice in chunk.choices))


def http_whole(service: Served, prompt: str) -> Said:
    reply = openai_client(service.http).completions.create(model="tiny", prompt=prompt, **FEW)
    return Said(openai_id(reply), reply.choices[0].text)


def http_streamed(service: Served, prompt: str) -> Said:
    chunks = [*openai_client(service.http).completions.create(model="tiny", prompt=prompt, stream=True, **FEW)]
    return Said(openai_id(chunks[0]), "".join(choice.text for chunk in chunks for choice in chunk.choices))


Sender = Callable[[Served, str], Said]
SENDERS: tuple[Sender, ...] = (grpc_whole, grpc_streamed, http_whole, http_streamed)
