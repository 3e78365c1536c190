"""`motley chat` against a service played by the standard library."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from motley.cli.app import run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Played(BaseHTTPRequestHandler):
    """Answers every chat with its last message, word by word."""

    seen: ClassVar[list[dict[str, Any]]] = []
    keys: ClassVar[list[str | None]] = []
    fails: ClassVar[str] = ""

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "played"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        self.keys.append(self.headers["Authorization"])
        if self.fails == "refuse":
            self._send(429, json.dumps({"error": {"message": "no room now"}}))
            return
        words = [f"{word} " for word in body["messages"][-1]["content"].split()]
        events = [json.dumps({"choices": [{"delta": {"content": word}}]}) for word in words]
        events.insert(0, json.dumps({"choices": [{"delta": {"role": "assistant"}}]}))
        events.append({"": "[DONE]", "break": "", "fault": json.dumps({"error": {"message": "lost it"}})}[self.fails])
        self._send(200, "".join(f"data: {event}\n\n" for event in events if event))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Played, "seen", [])
    monkeypatch.setattr(Played, "keys", [])
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Played)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_one_question(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--url", url + "/v1/", "--system", "Be kind.", "--temperature", "0", "--api-key", "k"]
    assert run(["chat", "naïve words", *arguments]) == 0
    assert capsys.readouterr().out == "naïve words \n"
    assert Played.seen == [
        {
            "model": "played",
            "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "naïve words"}],
            "stream": True,
            "temperature": 0.0,
        }
    ]
    assert Played.keys == ["Bearer k"]


def test_a_conversation_remembers_and_forgets(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("one two\n\nthree\n/reset\nfour\n/quit\nnever\n"))
    assert run(["chat", "--url", url]) == 0
    asked = [[message["content"] for message in body["messages"]] for body in Played.seen]
    assert asked == [["one two"], ["one two", "one two ", "three"], ["four"]]
    assert "four " in capsys.readouterr().out


def test_what_is_piped_in_follows_the_question(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the text"))
    assert run(["chat", "Shorten:", "--url", url]) == 0
    assert Played.seen[0]["messages"][-1]["content"] == "Shorten:\nthe text"


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ("refuse", "the service answered 429: no room now"),
        ("fault", "lost it"),
        ("break", "the stream ended before its last message"),
    ],
)
def test_a_failing_service_is_told_in_one_line(
    fails: str, says: str, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Played, "fails", fails)
    assert run(["chat", "x", "--url", url]) == 1
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
