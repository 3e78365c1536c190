"""Process of one grammar: compiles it, then says which tokens may follow.

A hostile grammar can occupy the library for hours, in matching no less than in compiling, or crash it. Here it
harms only the requests that use it: timers and limits of the operating system end the process, whatever it is doing.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xgrammar

from ...host.child_frames import GrammarCommand, GrammarReply, decode_ids, encode_frame, receive_frame
from ...host.forkserver import limit_memory
from ..grammar_spec import OBJECT_SCHEMA, GrammarKind
from ..regex.automaton import TooManyStates
from ..regex.text_rules import regex_grammar
from .xgrammar_rules import schema_rules, tag_rules

MATCH_CPU_S = 1.0  # most CPU seconds for one token, or for a resumed sequence's replay
# Elapsed time is longer: the process has low priority, and on a busy machine waits seconds for a core.
MATCH_WALL_S = 30.0
COMPILE_WALL = 15  # most elapsed seconds of compiling, for each CPU second that is allowed
MAX_WHITESPACE = 40  # characters in a row between JSON's parts: a model may indent, not idle
MEMORY_BYTES = 512 * 2**20  # most memory beyond what the process has before it compiles
MAX_EAGER_STATES = 32  # most states of automata whose masks are all made when the grammar is compiled
_COUNTED = re.compile(r"^\S+_l\d+ ::= \[(?!\^)", re.MULTILINE)  # a class that is counted state by state
_STATE = re.compile(r"^\S+_s\d+ ::=", re.MULTILINE)  # a rule of text_rules.py
_BOUNDED = re.compile(r'"(minLength|maxLength|pattern|format)"\s*:')  # in a structural tag's schemas
# First bytes of UTF-8 -> second bytes that make no character: overlong forms, surrogates, or code points beyond
# the last one. The library lets these bytes follow.
_NO_TEXT = {
    b"\xe0": (b"\x80", b"\x9f"),
    b"\xed": (b"\xa0", b"\xbf"),
    b"\xf0": (b"\x80", b"\x8f"),
    b"\xf4": (b"\x90", b"\xbf"),
}
# Prefix of the library's messages: the time, and the place in its code
_WHERE = re.compile(r"^(\[[\d:]+\] )?(\S+:\d+: )?(Check failed: \(.*?\) is false: )?")


@dataclass(frozen=True)
class TokenVocabulary:
    """A model's tokens, as the grammar library needs them.

    plain   xgrammar.TokenizerInfo of all tokens
    json    the same without tokens that hold control characters other than a line's end: where a string's length is
            bounded the library lets those pass, which is no JSON
    """

    tokens: list[bytes]
    plain: Any
    json: Any
    vocab_size: int
    stop_ids: tuple[int, ...]

    @property
    def mask_int32s(self) -> int:
        return (self.vocab_size + 31) // 32

    @cached_property
    def no_text(self) -> dict[bytes, Any]:
        """Masks of the tokens that would make invalid UTF-8, by the last token's last byte: only E0, ED, F0 and F4
        restrict the next byte so.
        """
        starts = enumerate(token[:1] for token in self.tokens)
        found: dict[bytes, list[int]] = {lead: [] for lead in _NO_TEXT}
        for token_id, start in starts:
            for lead, (first_byte, last_byte) in _NO_TEXT.items():
                if first_byte <= start <= last_byte:
                    found[lead].append(token_id)
        return {lead: self.pack(token_ids) for lead, token_ids in found.items()}

    def pack(self, token_ids: Iterable[int]) -> Any:
        """Return a mask of these token ids, uint8 [4 * mask_words]."""
        bits = np.zeros(self.mask_int32s * 32, dtype=bool)
        bits[list(token_ids)] = True
        return np.packbits(bits, bitorder="little")


class GrammarRefused(Exception):
    """Error for a grammar that cannot be used; its text is shown to the client."""


def serve_grammar(connection: socket.socket, vocabulary: TokenVocabulary) -> None:
    """Compile and match a grammar until the engine closes the connection, or a limit ends the process."""
    limit_memory(MEMORY_BYTES)
    first = receive_frame(connection)
    if first is None:
        return
    request = json.loads(first[2])
    try:
        with _ProcessTimer(request["cpu_s"], COMPILE_WALL * request["cpu_s"]):
            matching = CompiledGrammarMatchers(_compile(vocabulary, request["kind"], request["source"]), vocabulary)
            matching.check()
    except GrammarRefused as refused:
        connection.sendall(encode_frame(GrammarReply.REFUSED, payload=str(refused).encode()))
        return
    connection.sendall(encode_frame(GrammarReply.READY))
    while (received := receive_frame(connection)) is not None:
        what, sequence, payload = received
        if what == GrammarCommand.CLOSE:
            matching.close(sequence)
            continue
        with _ProcessTimer(MATCH_CPU_S, MATCH_WALL_S):
            reply, mask = matching.take(sequence, decode_ids(payload), new=what == GrammarCommand.OPEN)
        connection.sendall(encode_frame(reply, sequence, mask))


class CompiledGrammarMatchers:
    """Matchers of the sequences that use one compiled grammar."""

    def __init__(self, compiled: Any, vocabulary: TokenVocabulary) -> None:
        self._compiled = compiled
        self._matchers: dict[int, Any] = {}
        self._mask = np.zeros((1, vocabulary.mask_int32s), dtype=np.int32)
        self._tokens = vocabulary.tokens
        self._stops = vocabulary.pack(vocabulary.stop_ids)
        self._no_text = vocabulary.no_text

    def check(self) -> None:
        """Raise GrammarRefused unless some text follows the grammar, as far as its first token shows."""
        reply, _ = self.take(0, [], new=True)
        self.close(0)
        if reply == GrammarReply.DEAD_END:
            raise GrammarRefused("no text at all follows it")

    def take(self, sequence: int, token_ids: list[int], *, new: bool) -> tuple[GrammarReply, bytes]:
        if new:
            self._matchers[sequence] = xgrammar.GrammarMatcher(self._compiled)
        matcher = self._matchers[sequence]
        for token_id in token_ids:
            if not matcher.accept_token(token_id):
                return GrammarReply.DEAD_END, b""
        if matcher.is_terminated():
            return GrammarReply.DONE, b""
        matcher.fill_next_token_bitmask(self._mask)
        bits = self._mask.view(np.uint8)[0]
        if token_ids and (last := self._tokens[token_ids[-1]][-1:]) in self._no_text:
            bits &= ~self._no_text[last]
        if (bits & ~self._stops).any():
            return GrammarReply.MASK, bits.tobytes()
        return (GrammarReply.DONE if matcher.is_completed() else GrammarReply.DEAD_END), b""

    def close(self, sequence: int) -> None:
        self._matchers.pop(sequence, None)


def _compile(vocabulary: TokenVocabulary, kind: str, source: str) -> Any:
    info = vocabulary.json if kind.startswith("json") or _BOUNDED.search(source) else vocabulary.plain
    with tempfile.TemporaryFile() as warnings:
        saved_stderr = os.dup(2)
        os.dup2(warnings.fileno(), 2)  # the library reports only on stderr what it leaves out
        try:
            rules = _library_rules(GrammarKind(kind), source)
            compiled = _compiler(info, rules).compile_grammar(rules)
        except TooManyStates as error:
            raise GrammarRefused(str(error) or "its expression needs too many states") from None
        except (RuntimeError, ValueError, TypeError, RecursionError) as error:
            raise GrammarRefused(_library_reason(str(error))) from None
        finally:
            os.dup2(saved_stderr, 2)
            os.close(saved_stderr)
        warnings.seek(0)
        said = warnings.read().decode(errors="replace")
    if "Warning" in said:
        raise GrammarRefused(_library_reason(said).removeprefix("Warning: "))
    return compiled


def _library_rules(kind: GrammarKind, source: str) -> str:
    """Return the grammar in the library's notation."""
    match kind:
        case GrammarKind.JSON_OBJECT:
            return schema_rules(OBJECT_SCHEMA, MAX_WHITESPACE)
        case GrammarKind.JSON_SCHEMA:
            return schema_rules(source, MAX_WHITESPACE)
        case GrammarKind.REGEX:
            return regex_grammar(source)
        case GrammarKind.EBNF:
            return source
        case GrammarKind.STRUCTURAL_TAG:
            return tag_rules(json.loads(source))


def _compiler(info: Any, rules: str) -> Any:
    """Return a compiler. For many states or counted classes it computes a state's mask only when a text reaches the
    state, since all masks would take too long.
    """
    late = len(_STATE.findall(rules)) > MAX_EAGER_STATES or _COUNTED.search(rules) is not None
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False, enable_dynamic_compilation=late)


def _library_reason(said: str) -> str:
    """Return the first line of the library's message, without the place in its own code."""
    return _WHERE.sub("", said.strip().partition("\n")[0])[:300] or "it cannot be compiled"


class _ProcessTimer:
    """Context with two timers, whose signals end the process by default, even inside the library."""

    def __init__(self, cpu_s: float, wall_s: float) -> None:
        self._cpu_s, self._wall_s = cpu_s, wall_s

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._cpu_s)
        signal.setitimer(signal.ITIMER_REAL, self._wall_s)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
