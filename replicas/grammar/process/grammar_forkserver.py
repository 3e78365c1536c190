"""Process from which grammars' processes are forked, so that imports and the vocabulary are loaded only once.

Run as `python -m motley.replicas.grammar.process.grammar_forkserver FD`. It has one thread and touches no device, so
that forking it is safe; it ends when its engine does.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from typing import Any, NoReturn

import xgrammar

from ...host.child_frames import GrammarReply, decode_vocabulary, encode_frame, receive_frame
from ...host.forkserver import fork_for_each, prepare_forkserver
from .grammar_worker import TokenVocabulary, serve_grammar
from .xgrammar_rules import UnknownLibraryRules, check_library

_CONTROL = re.compile(rb"[\x00-\x09\x0b-\x1f]")

NICENESS = 10  # the engine's own threads go first


def main(descriptor: int) -> None:
    prepare_forkserver(NICENESS)
    control = socket.socket(fileno=descriptor)
    received = receive_frame(control)
    if received is None:
        return
    try:
        check_library()
    except UnknownLibraryRules as error:
        control.sendall(encode_frame(GrammarReply.REFUSED, payload=str(error).encode()))
        return
    vocabulary = _vocabulary(received[2])
    assert vocabulary.no_text  # computed here, once for all children
    control.sendall(encode_frame(GrammarReply.READY))
    fork_for_each(control, lambda connection: _child(connection, vocabulary))


def _child(connection: socket.socket, vocabulary: TokenVocabulary) -> NoReturn:
    try:
        with contextlib.suppress(OSError):  # the engine has closed its end
            serve_grammar(connection, vocabulary)
    finally:
        os._exit(0)


def _vocabulary(payload: bytes) -> TokenVocabulary:
    tokens, vocab_size, stop_ids = decode_vocabulary(payload)

    def info(those: list[bytes]) -> Any:
        kind = xgrammar.VocabType.RAW
        return xgrammar.TokenizerInfo(those, kind, vocab_size=vocab_size, stop_token_ids=stop_ids or None)

    printable = [b"" if _CONTROL.search(token) else token for token in tokens]
    return TokenVocabulary(tokens, info(tokens), info(printable), vocab_size, tuple(stop_ids))


if __name__ == "__main__":
    main(int(sys.argv[1]))
