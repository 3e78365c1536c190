"""Processes that were stopped (SIGSTOP), and the ones that take their places."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from grammar_engine import make_engine
from serve_process import wait_for

from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.errors import InvalidRequest, Unavailable
from motley.replicas.grammar.grammar_spec import GrammarSpec
from motley.replicas.grammar.process import grammar_process
from motley.replicas.grammar.process.grammar_process import GrammarProcess
from motley.replicas.host import forkserver, watched_process
from motley.replicas.host.forkserver import Forkserver, ProcessLost, WatchedConnection
from motley.replicas.host.watched_process import WatchedProcess
from motley.replicas.sampling_params import SamplingParams
from motley.replicas.text.tokenizer.tokenizer_process import TokenizerProcess

FREE = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_process, "STOPPED_TIMEOUT_S", 0.05)
    for module in (forkserver, grammar_process):
        monkeypatch.setattr(module, "POLL_S", 0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stopped")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return make_engine(folder)


@pytest.fixture
def asleep() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def stop(pid: int) -> None:
    """Stop a process, and wait until it is."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        pass


def test_only_a_stopped_process_is_ended(asleep: subprocess.Popen[bytes]) -> None:
    watched = WatchedProcess(asleep.pid)
    assert not watched.end_if_stopped()
    assert not watched.end_if_stopped(at_once=True)
    stop(asleep.pid)
    while not watched.end_if_stopped():
        assert asleep.poll() is None
    assert asleep.wait() == -signal.SIGKILL
    assert watched.is_gone()


def test_one_that_is_continued_soon_is_not(asleep: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_process, "STOPPED_TIMEOUT_S", 1e9)
    watched = WatchedProcess(asleep.pid)
    stop(asleep.pid)
    assert not watched.end_if_stopped()
    os.kill(asleep.pid, signal.SIGCONT)
    monkeypatch.setattr(watched_process, "STOPPED_TIMEOUT_S", 0.0)
    while (state := Path(f"/proc/{asleep.pid}/stat").read_text().rpartition(")")[2].split()[0]) == "T":
        pass
    assert not watched.end_if_stopped()
    assert (asleep.poll(), state != "Z") == (None, True)


def test_neither_is_another_process_that_has_its_number(asleep: subprocess.Popen[bytes]) -> None:
    watched = WatchedProcess(asleep.pid)
    watched._began = "1"
    stop(asleep.pid)
    assert not watched.end_if_stopped(at_once=True)
    assert watched.is_gone()


def test_without_proc_nothing_counts_as_stopped(
    asleep: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stop(asleep.pid)
    monkeypatch.setattr(watched_process, "Path", lambda name: tmp_path / name.strip("/"))
    watched = WatchedProcess(asleep.pid)
    assert not watched.end_if_stopped(at_once=True)
    assert not watched.is_gone()


def test_a_line_ends_where_the_process_has_and_another_holds_its_end() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    watched = WatchedProcess(process.pid)
    process.wait()
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ProcessLost, match="has ended"):
        WatchedConnection(ours, watched, 60.0).recv(1)


# --- grammars ---


def forkserver_of(engine: Engine) -> Forkserver:
    grammars = engine._built.core.grammars
    assert grammars is not None
    grammars.prepare(GrammarSpec.regex("x")).result()
    assert grammars._forkserver is not None
    return grammars._forkserver


def process_of(engine: Engine, spec: GrammarSpec) -> GrammarProcess:
    grammars = engine._built.core.grammars
    assert grammars is not None
    return grammars.prepare(spec).result()


@pytest.mark.parametrize("which", [("child",), ("forkserver",), ("forkserver", "child")])
def test_streams_with_a_grammar_go_on_as_they_would_have(engine: Engine, which: tuple[str, ...]) -> None:
    """Both of one process; and beside them nobody notices."""
    spec = GrammarSpec.regex(f"[a-z]{{40,{40 + len(which) + len(which[0])}}}")
    constrained = [SamplingParams(temperature=1.0, seed=seed, max_tokens=60, grammar=spec) for seed in (1, 2)]
    whole = [engine.generate("x", sampling)[0].token_ids for sampling in (*constrained, FREE)]
    streams = [engine.stream("x", sampling) for sampling in (*constrained, FREE)]
    begun = [list(next(stream).token_ids) for stream in streams]
    old, first = forkserver_of(engine), process_of(engine, spec)
    pids = {"forkserver": old._process.pid, "child": first._watched.pid}
    for name in which:
        stop(pids[name])
    fresh = GrammarSpec.regex(f"as well {''.join(which)}")
    assert engine.generate("x", SamplingParams(grammar=fresh, max_tokens=50))[0].text == f"as well {''.join(which)}"
    rest = [[token for delta in stream for token in delta.token_ids] for stream in streams]
    assert [a + b for a, b in zip(begun, rest, strict=True)] == whole
    assert first.stopped == ("child" in which)
    assert old.alive == ("forkserver" not in which)


def test_one_that_is_stopped_while_it_compiles_is_replaced(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = stopped_children(monkeypatch, 1)
    found = engine.generate("x", SamplingParams(grammar=GrammarSpec.regex("compiled"), max_tokens=50))[0]
    assert found.text == "compiled"
    [watched] = ended
    wait_for(watched.is_gone, "its end")


def stopped_children(monkeypatch: pytest.MonkeyPatch, count: int) -> list[WatchedProcess]:
    """The processes that are forked next, stopped before they have anything to do."""
    real, found = Forkserver.child, list[WatchedProcess]()

    def child(self: Forkserver) -> tuple[socket.socket, WatchedProcess]:
        connection, watched = real(self)
        if len(found) < count:
            found.append(watched)
            stop(watched.pid)
        return connection, watched

    monkeypatch.setattr(Forkserver, "child", child)
    return found


def test_a_second_loss_is_no_fault_of_the_clients(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers a request that comes, and a stream which then ends; nothing is held against the grammar."""
    spec, streamed = GrammarSpec.regex("twice"), GrammarSpec.regex("[a-z]{80}")
    stream = engine.stream("x", SamplingParams(seed=1, max_tokens=100, grammar=streamed))
    next(stream)
    stop(process_of(engine, streamed)._watched.pid)
    ended = stopped_children(monkeypatch, 2)
    with pytest.raises(Unavailable, match="lost twice") as refused:
        list(stream)
    assert (refused.value.status, refused.value.code) == (503, "structured_output_unavailable")
    assert len(ended) == 2
    stopped_children(monkeypatch, 2)
    with pytest.raises(Unavailable, match="lost twice"):
        process_of(engine, spec)
    assert not process_of(engine, spec).lost
    assert not process_of(engine, streamed).lost


def test_what_is_stopped_ends_with_its_grammar(engine: Engine) -> None:
    """It would not see that its connection has ended."""
    grammars = engine._built.core.grammars
    assert grammars is not None
    spec = GrammarSpec.regex("unused")
    watched = process_of(engine, spec)._watched
    stop(watched.pid)
    grammars.refuse(spec, InvalidRequest("grammar: unused", param="grammar"))
    while not watched.is_gone():
        pass


# --- the tokenizer's process ---


@pytest.fixture(scope="module")
def aside(folder: Path, engine: Engine) -> TokenizerProcess:
    aside = TokenizerProcess(folder)
    aside.start()
    return aside


def ids(aside: TokenizerProcess) -> list[int]:
    too_much = InvalidRequest("too much", param="prompt")
    return aside.begin("encode", {"text": "abc"}, tenant="", param="prompt", too_much=too_much).result()


def test_a_stopped_tokenizer_is_replaced(aside: TokenizerProcess) -> None:
    whole, old = ids(aside), aside._forkserver
    assert old is not None
    stop(old._process.pid)
    assert ids(aside) == whole
    assert not old.alive
    assert aside._forkserver is not old


def test_a_tokenizer_that_was_killed_a_moment_ago_is_replaced(
    aside: TokenizerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it was noticed that it has ended."""
    whole, old = ids(aside), aside._forkserver
    assert old is not None
    real = type(old).call

    def ask(self: Forkserver, request: bytes) -> object:
        if self is old:
            old._process.kill()
            old._process.wait()
        return real(self, request)  # type: ignore[arg-type]

    monkeypatch.setattr(type(old), "call", ask)
    assert ids(aside) == whole


def test_a_stopped_process_of_one_text_is_replaced(aside: TokenizerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, old = ids(aside), aside._forkserver
    ended = stopped_children(monkeypatch, 1)
    assert ids(aside) == whole
    [watched] = ended
    wait_for(watched.is_gone, "its end")
    assert aside._forkserver is old


def test_a_second_loss_is_told_as_one(aside: TokenizerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_children(monkeypatch, 2)
    with pytest.raises(Unavailable, match="lost twice") as refused:
        ids(aside)
    assert (refused.value.status, refused.value.code) == (503, "tokenizer_lost")
    assert ids(aside)
