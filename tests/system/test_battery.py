"""One table of bad requests over every protocol of a live service: refused by name, and nothing else happens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from bad_rows import (
    CHATS,
    EMBEDDINGS,
    EVERYTHING,
    IN_PYTHON,
    NO_SAMPLING,
    OVER_GRPC,
    OVER_HTTP,
    RESPONSES,
    ROWS,
    WIRES,
    WITHOUT_END,
    Elsewhere,
)
from every_protocol import Grpc, Http, Outcome, Protocol, Question, Unsayable, everything
from serve_process import Served
from thorough import thorough

from motley.client import Client
from motley.replicas.engine.entrypoints.offline import Engine

ROOT = Path(__file__).parents[2]
EMBEDS = EMBEDDINGS + NO_SAMPLING
# Of each door, and of each way to write a request, one.
EACH_TIME = (
    "completions stream", "chat", "embeddings", "kserve REST", "responses", "motley CompleteStream", "motley Chat",
    "kserve ModelStreamInfer, streaming", "vllm Generate", "Engine.stream",
)  # fmt: skip


def named(*names: str) -> pytest.MarkDecorator:
    retained = [name for name in names if name in EACH_TIME]
    return pytest.mark.parametrize("name", [*retained, *thorough(*(name for name in names if name not in EACH_TIME))])


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    return Engine(checkpoint, kv_memory_bytes=2**26, threads=1)


@pytest.fixture(scope="module")
def protocols(service: Served, engine: Engine) -> Iterator[dict[str, Protocol]]:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(service.grpc, options=options) as channel:
        yield {protocol.name: protocol for protocol in everything(service.http_port, channel, engine, "tiny")}


@pytest.fixture(autouse=True)
def _nothing_else_happens(
    request: pytest.FixtureRequest, service: Served, engine: Engine, protocols: dict[str, Protocol]
) -> Iterator[None]:
    """Over the protocol at hand: same processes, same greedy answer, queues and KV as they were.

    Beside it a neighbour is answered all the time, as it is alone: one of the service, or of the engine in here.
    """
    name = request.node.callspec.params["name"] if hasattr(request.node, "callspec") else None
    names = [one for one in ([name] if name else EVERYTHING) if one not in RESPONSES]

    def responses() -> list[Outcome]:
        found = [protocols[one].ask(Question(one_prompt(one), sampling=greedy(one))) for one in names]
        assert {outcome.kind for outcome in found} <= {"ok"}
        return found

    before, replicas = responses(), service.replicas()
    in_here = set(names) & set(IN_PYTHON)
    with beside(engine) if in_here else nullcontext(), beside_all(service) if set(names) - in_here else nullcontext():
        yield
        assert responses() == before
    assert service.replicas() == replicas
    service.wait_idle()


@contextmanager
def beside(engine: Engine) -> Iterator[None]:
    """A stream that is open meanwhile. At the end nothing but it was there, and no KV is left."""
    core, steady = engine._built.core, engine.sampling(temperature=0.0, max_tokens=300, ignore_eos=True)
    alone = engine.generate("neighbour", steady)[0].text
    neighbour = engine.stream("neighbour", steady)
    begun = next(neighbour).text
    yield
    assert begun + "".join(delta.text for delta in neighbour) == alone
    assert not core.busy
    core.scheduler.pool.check(idle=True)


@contextmanager
def beside_all(service: Served) -> Iterator[None]:
    """A client of the service whose one stream is followed by the next meanwhile."""
    ended, begun, streams = threading.Event(), threading.Event(), []
    with Client(service.grpc, retries=0) as client, ThreadPoolExecutor(1) as thread:
        steady = partial(client.stream, "a neighbour", temperature=0.0, max_tokens=200, ignore_eos=True)

        def read() -> list[int]:
            ids: list[int] = []
            for chunk in steady():
                ids += [token for choice in chunk.choices for token in choice.token_ids]
                begun.set()
            return ids

        def stream_on() -> None:
            while not ended.is_set():
                streams.append(read())

        alone = read()
        begun.clear()
        reading = thread.submit(stream_on)
        try:
            assert begun.wait(60), "the neighbour's stream has begun"
            yield
        finally:
            ended.set()
            reading.result(60)
    assert len(alone) == 200
    assert streams == [alone] * len(streams)


def greedy(name: str) -> dict[str, Any]:
    return {} if name in EMBEDS else {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}


def seen(expected: Outcome, found: Outcome, protocol: Protocol, question: Question) -> Outcome:
    """Return what is expected, as far as this protocol tells it."""
    kind = expected.kind if protocol.tells_kind or expected.kind == "ok" or found.kind != "refused" else "refused"
    code = expected.code if expected.code is not None and protocol.tells_code else found.code
    param = "unknown" if found.param == "unknown" and expected.param in question.fields else expected.param
    return Outcome(kind, param, code, found.said)


def test_every_row_says_what_comes_over_every_protocol(protocols: dict[str, Protocol]) -> None:
    assert set(protocols) == set(EVERYTHING) > set(EACH_TIME)
    wrong = []
    for row in ROWS:
        for name, protocol in protocols.items():
            try:
                protocol.write(row.question)
                reason = ""
            except Unsayable as unsayable:
                reason = str(unsayable)
            if bool(reason) != isinstance(row.of(name), str):
                wrong.append((row.what, name, reason or "can be asked", row.of(name)))
    assert not wrong
    assert set(OVER_HTTP) == {name for name, one in protocols.items() if isinstance(one, Http)} - set(RESPONSES)
    assert set(OVER_GRPC) == {name for name, one in protocols.items() if isinstance(one, Grpc)}


def test_what_is_tested_elsewhere_is() -> None:
    named = {one for row in ROWS for one in map(row.of, EVERYTHING) if isinstance(one, Elsewhere)}
    for elsewhere in {*named, *WITHOUT_END}:
        file, _, name = elsewhere.test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), elsewhere


@named(*EVERYTHING)
def test_words(protocols: dict[str, Protocol], name: str) -> None:
    protocol, wrong, asked = protocols[name], [], 0
    for row in ROWS:
        expected = row.of(name)
        if not isinstance(expected, Outcome):
            continue
        asked += 1
        found = protocol.ask(row.question)
        if found != seen(expected, found, protocol, row.question):
            wrong.append(f"{row.what}: {found} and not {expected}")
    assert not wrong, "\n".join(wrong)
    assert asked >= 10


@named(*OVER_HTTP, *RESPONSES, *OVER_GRPC)
def test_bytes(protocols: dict[str, Protocol], name: str) -> None:
    protocol, wrong = protocols[name], []
    for row in WIRES:
        if isinstance(protocol, Http):
            how, expected = row.http, row.but.get(name, row.http_outcome)
        else:
            assert isinstance(protocol, Grpc)
            how, expected = row.grpc, row.but.get(name, row.grpc_outcome)
        if isinstance(how, str):
            continue
        found = how(protocol)
        if found != seen(expected, found, protocol, Question()):
            wrong.append(f"{row.what}: {found} and not {expected}")
    assert not wrong, "\n".join(wrong)


@named(*OVER_HTTP, *OVER_GRPC)
def test_requests_of_one_id_at_the_same_time(protocols: dict[str, Protocol], name: str) -> None:
    protocol = protocols[name]
    questions = [
        Question(prompt(name), sampling=greedy(name), id="the-same") for prompt in (one_prompt, another_prompt)
    ]
    alone = [protocol.ask(question) for question in questions]
    assert [outcome.kind for outcome in alone] == ["ok", "ok"]
    assert alone[0].said != alone[1].said
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(protocol.ask, questions * 4)) == alone * 4


def one_prompt(name: str) -> str | list[int]:
    return "one" if name in CHATS else [65, 66, 67]


def another_prompt(name: str) -> str | list[int]:
    return "quite another" if name in CHATS else [97] * 20
