"""Compiled grammars over a vocabulary of single bytes, in the test's own process: which texts they take, and texts that
they let a model write.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import xgrammar

from motley.replicas.grammar.grammar_spec import GrammarSpec
from motley.replicas.grammar.process.grammar_worker import CompiledGrammarMatchers, TokenVocabulary, _compile
from motley.replicas.host.child_frames import GrammarReply

END = 256
_CLOSING = frozenset(b'"}]')


def byte_vocabulary() -> TokenVocabulary:
    """Return a vocabulary with a token for each byte, and one that ends."""
    tokens = [bytes([value]) for value in range(END)]
    info = xgrammar.TokenizerInfo([*tokens, b""], xgrammar.VocabType.RAW, vocab_size=END + 1, stop_token_ids=[END])
    return TokenVocabulary(tokens=tokens, plain=info, json=info, vocab_size=END + 1, stop_ids=(END,))


VOCABULARY = byte_vocabulary()


class ByteGrammar:
    """A grammar that is compiled. Raises GrammarRefused as a replica's process would."""

    def __init__(self, spec: GrammarSpec) -> None:
        self._compiled = _compile(VOCABULARY, spec.kind, spec.source)
        CompiledGrammarMatchers(self._compiled, VOCABULARY).check()

    def takes(self, value: Any) -> bool:
        """Return whether the value may be written, without spaces."""
        matcher = xgrammar.GrammarMatcher(self._compiled)
        return bool(matcher.accept_string(json.dumps(value, separators=(",", ":"))) and matcher.is_completed())

    def text(self, draw: random.Random, longest: int) -> str | None:
        """Return a text of bytes drawn from what may follow, which ends soon behind `longest`; None if it does not."""
        matching = CompiledGrammarMatchers(self._compiled, VOCABULARY)
        said: list[int] = []
        while len(said) < 3 * longest:
            response, mask = matching.take(0, said[-1:], new=not said)
            if response is GrammarReply.DONE:
                return bytes(said).decode()
            bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
            able = [token for token in bits.nonzero()[0].tolist() if token < END and not chr(token).isspace()]
            if bits[END] and (not able or draw.random() < 0.3):
                return bytes(said).decode()
            late = len(said) > longest
            said += draw.choices(able, [1e6 if late and token in _CLOSING else 1 for token in able])
        return None
