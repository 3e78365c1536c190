"""`motley chat` against a service played by a real gRPC server."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from motley.cli.app import run
from motley.client import retry
from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Played(inference_pb2_grpc.InferenceServicer):
    """Answers every chat with its last message, word by word; fails as it is told to."""

    def __init__(self) -> None:
        self.seen: list[pb.ChatRequest] = []
        self.keys: list[str | None] = []
        self.fails: tuple[grpc.StatusCode, str] | None = None
        self.breaks = 0
        self.thought = ""
        self.target = ""

    def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(name="played")])

    def ChatStream(self, request: pb.ChatRequest, context: Any) -> Iterator[pb.CompletionChunk]:
        self.seen.append(request)
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        if self.fails is not None:
            context.abort(*self.fails)
        yield pb.CompletionChunk(started=pb.Started(seed=7))
        if self.thought:
            yield pb.CompletionChunk(choices=[pb.Choice(reasoning_content=self.thought, token_ids=[1])])
        done = len(request.output_ids[0].ids) if request.output_ids else 0
        for number, word in enumerate(request.messages[-1].content.split()[done:]):
            if self.breaks and number == 1:
                self.breaks -= 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "lost it")
            yield pb.CompletionChunk(choices=[pb.Choice(text=f"{word} ", token_ids=[1])])
        yield pb.CompletionChunk(usage=pb.Usage())


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.01)
    service = Played()
    server = grpc.server(ThreadPoolExecutor(2))
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    service.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield service
    server.stop(None)


def requested(request: pb.ChatRequest) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.messages]


def test_one_question(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--target", played.target, "--system", "Be kind.", "--temperature", "0", "--api-key", "k"]
    assert run(["chat", "naïve words", *arguments]) == 0
    assert capsys.readouterr().out == "naïve words \n"
    [request] = played.seen
    assert requested(request) == [("system", "Be kind."), ("user", "naïve words")]
    assert request.sampling == pb.SamplingParams(temperature=0.0)
    assert played.keys == ["Bearer k"]


@pytest.mark.parametrize("tty", [True, False])
def test_people_see_what_the_model_thought(
    tty: bool, played: Played, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    played.thought = "Hm."
    monkeypatch.setattr(sys.stdout, "isatty", lambda: tty)
    assert run(["chat", "words", "--target", played.target]) == 0
    assert capsys.readouterr().out == ("\033[2mHm.\033[0m" if tty else "") + "words \n"


def test_a_conversation_remembers_and_forgets(
    played: Played, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("one two\n\nthree\n/reset\nfour\n/quit\nnever\n"))
    assert run(["chat", "--target", played.target]) == 0
    texts = [[text for _, text in requested(request)] for request in played.seen]
    assert texts == [["one two"], ["one two", "one two ", "three"], ["four"]]
    shown = capsys.readouterr()
    assert "four " in shown.out
    assert shown.err.startswith(f"played at {played.target}")


def test_what_is_piped_in_follows_the_question(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the text"))
    assert run(["chat", "Shorten:", "--target", played.target]) == 0
    assert requested(played.seen[0])[-1] == ("user", "Shorten:\nthe text")


def test_an_answer_that_breaks_goes_on(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    played.breaks = 2
    assert run(["chat", "one two three four", "--target", played.target]) == 0
    assert capsys.readouterr().out == "one two three four \n"
    assert [request.sampling.seed for request in played.seen] == [0, 7, 7]


@pytest.mark.parametrize(
    ("code", "says", "exit_status"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "no room now", 1),
        (grpc.StatusCode.UNAUTHENTICATED, "no API key came with the call", 1),
        (grpc.StatusCode.INVALID_ARGUMENT, "max_tokens: too many", 2),  # as for a bad option
    ],
)
def test_a_refusal_is_told_in_one_line(
    code: grpc.StatusCode, says: str, exit_status: int, played: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    played.fails = (code, says)
    assert run(["chat", "x", "--target", played.target]) == exit_status
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_no_service_is_told_with_the_remedy(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "x", "--target", "127.0.0.1:1"]) == 1
    err = capsys.readouterr().err
    assert "motley serve" in err
    assert err.count("\n") == 1
