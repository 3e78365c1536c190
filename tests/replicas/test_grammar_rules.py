"""Rules that the grammar library prints are read as far as they are known; anything else is an error, and no text."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from motley.replicas.errors import Unavailable
from motley.replicas.grammar.process import grammar_compiler, grammar_forkserver, xgrammar_rules
from motley.replicas.grammar.process.xgrammar_rules import (
    UnknownLibraryRules,
    check_library,
    exact_text_rules,
    tag_rules,
)
from motley.replicas.host import forkserver
from motley.replicas.host.child_frames import (
    GrammarCommand,
    GrammarReply,
    encode_frame,
    encode_vocabulary,
    receive_frame,
)

REAL: Any = xgrammar_rules.xgrammar.Grammar.from_json_schema


def said_otherwise(monkeypatch: pytest.MonkeyPatch, change: Callable[[str], str]) -> None:
    """The library's rules in other words."""

    def schema(*given: Any, **settings: Any) -> str:
        return change(str(REAL(*given, **settings)))

    monkeypatch.setattr(xgrammar_rules.xgrammar, "Grammar", SimpleNamespace(from_json_schema=schema))


OTHERWISE: dict[str, Callable[[str], str]] = {
    "patterns by another name": lambda said: said.replace("Regex(", "Pattern("),
    "patterns with another setting": lambda said: said.replace("json_string=true", "json_string=true, dotall=false"),
    "patterns within a rule": lambda said: re.sub(r"::= (Regex\(.*\))", r"::= (\1)", said),
    "patterns as plain text": lambda said: re.sub(r"Regex\((\"[^\"]*\"), json_string=true\)", r"((\1))", said),
    "patterns read by the library": lambda said: re.sub(r"Regex\(.*\)", r"(([a-z] [a-z]))", said),
    "escapes by another name": lambda said: said.replace("basic_escape", "json_escape"),
    "escapes within the rule": lambda said: re.sub(r"\"\\\\\" basic_escape", r'"\\\\" [bnu]', said),
    "escapes as a rule of several lines": lambda said: said.replace("basic_escape ::= ((", "basic_escape ::=\n  (("),
    "another arrow": lambda said: said.replace(" ::= ", " -> "),
    "a heading": lambda said: f"# rules\n{said}",
    "a rule twice": lambda said: f"{said}\nroot ::= basic_any",
    "another way to join": lambda said: said.replace('"\\"" root_prop_0_1', '"\\"", root_prop_0_1'),
    "nothing": lambda said: "",
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_rules_in_other_words_are_an_error(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check_library()
    said_otherwise(monkeypatch, OTHERWISE[name])
    with pytest.raises(UnknownLibraryRules, match=r"xgrammar [\d.]+ writes its rules in an unknown form: "):
        check_library()


def test_words_within_texts_are_no_rules() -> None:
    line = 'root ::= (("\\"Regex(\\" basic_escape ::= " [Regex]))'
    assert exact_text_rules(line) == line


def test_a_rule_that_dispatches_tags_has_several_lines() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    content = {"type": "json_schema", "json_schema": schema}
    tags = [{"begin": f"<tool_call>{name}:", "content": content, "end": "</tool_call>"} for name in ("one", "other")]
    triggered = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags}
    rules = tag_rules({"type": "structural_tag", "format": triggered})
    assert "TagDispatch(\n" in rules
    matcher = xgrammar_rules.xgrammar.GrammarMatcher(compiled(rules))
    assert matcher.accept_string('well <tool_call>other:{"city":"Oslo"}</tool_call> so')
    assert not matcher.accept_string('<tool_call>one:{"town":')


def compiled(rules: str) -> Any:
    info = xgrammar_rules.xgrammar.TokenizerInfo([bytes([i]) for i in range(256)], vocab_size=257, stop_token_ids=[256])
    return xgrammar_rules.xgrammar.GrammarCompiler(info, max_threads=1).compile_grammar(rules)


def test_the_forkserver_says_so_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, by the frames that its own would send."""
    said_otherwise(monkeypatch, OTHERWISE["escapes by another name"])
    monkeypatch.setattr(grammar_forkserver, "prepare_forkserver", lambda _: None)  # it would change this process
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(encode_frame(GrammarCommand.VOCABULARY, payload=encode_vocabulary([b"a"], 2, (1,))))
        grammar_forkserver.main(theirs.detach())
        answer = receive_frame(ours)
    assert answer is not None
    assert answer[0] == GrammarReply.REFUSED
    assert b"writes its rules in an unknown form" in answer[2]


def test_the_engine_hears_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no fault of a client's grammar, and one code tells it."""

    ends: list[socket.socket] = []

    def start(command: list[str], pass_fds: list[int], **_: Any) -> Any:
        theirs = socket.socket(fileno=os.dup(pass_fds[0]))
        ends.append(theirs)
        theirs.sendall(
            encode_frame(GrammarReply.REFUSED, payload=b"xgrammar 0.9 writes its rules in an unknown form: x")
        )
        return SimpleNamespace(pid=os.getpid(), wait=lambda *_: 0, poll=lambda: 0)

    monkeypatch.setattr(forkserver.subprocess, "Popen", start)
    with pytest.raises(Unavailable, match=r"xgrammar 0\.9 writes its rules") as refused:
        grammar_compiler._GrammarForkserver(b"")
    assert refused.value.code == "structured_output_unavailable"
    ends[0].close()
