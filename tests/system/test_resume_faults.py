"""Replicas that are killed, hang or are taken away under live streams, over both protocols: nobody notices."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from early_stop import early_stop
from served import Served, alive, wait_for

from motley.client import Client
from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import vllm_engine_pb2, vllm_engine_pb2_grpc

LATE = 8  # that come when a replica has stopped
STREAMS = 16  # more than one replica runs at a time
SEVERAL = "several, some ended"
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
    choices: dict[int, Told] = field(default_factory=dict)
    usages: list[int] = field(default_factory=list)

    def of(self, index: int) -> Told:
        return self.choices.setdefault(index, Told())


def over_grpc(service: Served, name: str, answer: Answer) -> Answer:
    with Client(service.grpc, retries=0) as client:  # that it goes on is the service's doing
        for chunk in client.stream(f"Once {name}", **SAMPLING[name]):
            for choice in chunk.choices:
                told = answer.of(choice.index)
                told.text += choice.text
                told.ids += choice.token_ids
                told.logprobs += [(entry.token_id, entry.logprob, len(entry.top)) for entry in choice.logprobs]
                if choice.finish_reason:
                    told.ends.append((choice.finish_reason, choice.stop_string))
            if chunk.HasField("usage"):
                answer.usages.append(chunk.usage.completion_tokens)
    return answer


OPENAI_FIELDS = ("temperature", "seed", "presence_penalty", "frequency_penalty", "logprobs", "n", "stop", "max_tokens")


def over_http(service: Served, name: str, answer: Answer) -> Answer:
    known = {key: value for key, value in SAMPLING[name].items() if key in OPENAI_FIELDS}
    extra = {key: value for key, value in SAMPLING[name].items() if key not in OPENAI_FIELDS}
    options = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": extra}
    for chunk in openai_client(service.http).completions.create(
        model="tiny", prompt=f"Once {name}", **known, **options
    ):
        for choice in chunk.choices:
            told = answer.of(choice.index)
            told.text += choice.text
            if choice.logprobs is not None:
                told.logprobs += zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)
            if choice.finish_reason is not None:
                told.ends.append(choice.finish_reason)
        if chunk.usage is not None:
            answer.usages.append(chunk.usage.completion_tokens)
    return answer


@cache
def openai_client(base: str) -> openai.OpenAI:
    """One for all: making one takes so long that streams which began first would end before the last begins."""
    return openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)


READERS: list[tuple[Callable[[Served, str, Answer], Answer], str]] = [
    (reader, name) for name in SAMPLING for reader in (over_grpc, over_http)
]


@pytest.fixture(scope="module")
def unbroken(pair: Served) -> list[Answer]:
    stop = early_stop(pair, f"Once {SEVERAL}", **SAMPLING[SEVERAL])
    SAMPLING[SEVERAL]["stop"] = [stop]
    with ThreadPoolExecutor(len(READERS)) as threads:
        answers = list(threads.map(lambda which: which[0](pair, which[1], Answer()), READERS))
    assert all(len(told.ends) == 1 for answer in answers for told in answer.choices.values())
    assert all(len(answer.usages) == 1 for answer in answers)
    over_grpc, over_http = several(answers)
    grpc_ends = {told.ends[0] for told in over_grpc.choices.values()}
    assert grpc_ends == {(pb.FINISH_REASON_STOP, stop), (pb.FINISH_REASON_LENGTH, "")}, "they end at different times"
    assert {told.ends[0] for told in over_http.choices.values()} == {"stop", "length"}
    return answers


def several(answers: list[Answer]) -> list[Answer]:
    """Those of which one choice ends early, over each protocol."""
    return [answer for answer, (_, name) in zip(answers, READERS, strict=True) if name == SEVERAL]


@pytest.fixture(autouse=True)
def both(pair: Served) -> None:
    """Serve may call one ready while the other still starts: what is killed must be what carries streams."""
    wait_for(lambda: states(pair) == ["RUNNING"] * 2 and len(carried(pair)) == 2, "two replicas", 240)


def pool(service: Served) -> list[int]:
    """Process ids of the replicas with an engine, in the order of their names, which `carried` has as well."""
    replicas = sorted(of_pool(service), key=lambda replica: str(replica["replica_id"]))
    return [int(replica["pid"]) for replica in replicas]


def busiest(service: Served) -> int:
    """The process that carries most sequences, as soon as there are some."""
    loads = wait_for(lambda: any(found := carried(service)) and found, "sequences that run")
    return pool(service)[loads.index(max(loads))]


def resumed(service: Served) -> int:
    """How many times a stream has gone on on another replica, says the ingress's log."""
    return moved(service) - retried(service)


def retried(service: Served) -> int:
    """How many times a request had to go elsewhere before anything of its answer had come."""
    return told(service, "goes on elsewhere after 0 tokens")


def moved(service: Served) -> int:
    """Both."""
    return told(service, "goes on elsewhere after")


def told(service: Served, words: str) -> int:
    logs = Path(service.endpoints["folder"], "session_latest", "logs").glob("worker-*.err")
    return sum(log.read_text().count(words) for log in logs)


@contextmanager
def readers(service: Served) -> Iterator[list[Any]]:
    """All streams of the table at once, some of them begun: on busy cores those end before the last begins.

    Of one a choice has ended already, and others go on.
    """
    answers = [Answer() for _ in READERS]
    with ThreadPoolExecutor(len(READERS)) as threads:
        futures = [
            threads.submit(reader, service, name, answer)
            for (reader, name), answer in zip(READERS, answers, strict=True)
        ]
        wait_for(lambda: sum(bool(answer.choices) for answer in answers) > len(answers) // 2, "streams")
        wait_for(lambda: any(told.ends for one in several(answers) for told in [*one.choices.values()]), "an early end")
        yield futures


def carried(service: Served) -> list[int]:
    """How many sequences run on each replica that the ingress knows."""
    with grpc.insecure_channel(service.grpc) as channel:
        answer = vllm_engine_pb2_grpc.VllmEngineStub(channel).GetLoads(vllm_engine_pb2.GetLoadsRequest(), timeout=10)
    return [load.num_running_reqs for load in answer.loads]


def check(service: Served, futures: list[Any], unbroken: list[Answer]) -> None:
    for future, whole, (reader, name) in zip(futures, unbroken, READERS, strict=True):
        assert future.result(300) == whole, f"{name} {reader.__name__}"


def check_baseline(service: Served, count: int = 2) -> None:
    """As many replicas as before, and nothing is left on them."""
    wait_for(lambda: states(service) == ["RUNNING"] * count, "a replica in the place of the lost one", 90)
    service.wait_idle()


def test_a_replica_is_killed(pair: Served, unbroken: list[Answer]) -> None:
    before = resumed(pair)
    for _ in range(4):  # until one went on elsewhere: they may all have ended a moment before
        with readers(pair) as futures:
            victim = busiest(pair)
            os.kill(victim, signal.SIGKILL)
            check(pair, futures, unbroken)
        check_baseline(pair)
        if resumed(pair) > before:
            break
    assert resumed(pair) > before


def test_a_replica_hangs(pair: Served, unbroken: list[Answer]) -> None:
    """Under streams that have begun, and before the first token of others: nobody has heard of its hanging yet."""
    short = {**SAMPLING["greedy"], "max_tokens": 20}
    alone = short_answers(pair, short)
    before, unseen = resumed(pair), retried(pair)
    for _ in range(4):
        with readers(pair) as futures, ThreadPoolExecutor(LATE) as threads:
            victim = busiest(pair)
            os.kill(victim, signal.SIGSTOP)
            late = [threads.submit(short_answers, pair, short) for _ in range(LATE)]
            assert [one.result(120) for one in late] == [alone] * LATE
            check(pair, futures, unbroken)
        wait_for(lambda pid=victim: not alive([pid]), "the hung replica to be removed", 90)
        check_baseline(pair)
        if resumed(pair) > before and retried(pair) > unseen:
            break
    assert resumed(pair) > before
    assert retried(pair) > unseen


def short_answers(service: Served, sampling: dict[str, Any]) -> tuple[str, str]:
    """Over gRPC and HTTP, each in one piece."""
    with Client(service.grpc, retries=0) as client:
        over_grpc = client.complete("Late", **sampling).choices[0].text
    known = {key: value for key, value in sampling.items() if key in OPENAI_FIELDS}
    extra = {key: value for key, value in sampling.items() if key not in OPENAI_FIELDS}
    answer = openai_client(service.http).completions.create(model="tiny", prompt="Late", **known, extra_body=extra)
    return over_grpc, answer.choices[0].text


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
    """What Serve thinks of the replicas with an engine."""
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


def test_a_replica_is_killed_before_the_first_token(pair: Served) -> None:
    """Nobody has seen anything yet: it is tried again, streamed or not, over both protocols; no client retries."""
    prompts = ["y" * number + "x" * 12_000 for number in range(4)]
    for _ in range(4):  # until it struck prompts that were being computed
        before = moved(pair)
        with ThreadPoolExecutor(4) as threads:
            futures = [threads.submit(ask, pair, one) for ask, one in zip(ASKS, prompts, strict=True)]
            wait_for(lambda: pair.load()["queued_prefill_tokens"] > 0, "prompts to be computed")
            os.kill(busiest(pair), signal.SIGKILL)
            answers = [future.result(300) for future in futures]
        check_baseline(pair)
        assert answers == [ask(pair, one) for ask, one in zip(ASKS, prompts, strict=True)]
        if moved(pair) > before:
            break
        prompts = [f"z{one}" for one in prompts]  # no prefix of these is known
    assert moved(pair) > before


FEW = {"temperature": 0.0, "max_tokens": 8}


def grpc_whole(service: Served, prompt: str) -> str:
    with Client(service.grpc, retries=0) as client:
        return client.complete(prompt, **FEW).choices[0].text


def grpc_streamed(service: Served, prompt: str) -> str:
    with Client(service.grpc, retries=0) as client:
        return "".join(choice.text for chunk in client.stream(prompt, **FEW) for choice in chunk.choices)


def http_whole(service: Served, prompt: str) -> str:
    with openai.OpenAI(base_url=f"{service.http}/v1", api_key="none", max_retries=0) as client:
        return client.completions.create(model="tiny", prompt=prompt, **FEW).choices[0].text


def http_streamed(service: Served, prompt: str) -> str:
    with openai.OpenAI(base_url=f"{service.http}/v1", api_key="none", max_retries=0) as client:
        chunks = client.completions.create(model="tiny", prompt=prompt, stream=True, **FEW)
        return "".join(choice.text for chunk in chunks for choice in chunk.choices)


ASKS = (grpc_whole, grpc_streamed, http_whole, http_streamed)
