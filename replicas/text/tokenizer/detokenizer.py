"""Detokenizer: turns token ids into text one token at a time, with the same result as decoding them all at once."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from ...errors import CheckpointError

EACH_BYTE = "motley.each-byte"  # error handler with one U+FFFD per bad byte, as byte-fallback vocabularies need it
MAX_GROWTH = 64  # most characters that the decoder may make of one character in a token's string
PROMPT_TAIL = 8  # last tokens of a prompt, more than can hold the beginning of an unfinished character


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "�" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _replace_each_byte)


@dataclass(frozen=True, slots=True)
class _DecoderRules:
    """Rules by which the `decoder` of tokenizer.json turns a token's string into text.

    replace        (from, to) pairs, in order
    byte_level     whether characters stand for bytes (GPT-2's alphabet)
    byte_fallback  whether `<0x0A>` stands for that byte
    strip          dropped once from the beginning of a text
    mark           dropped from the first token (Metaspace)
    joint          put before every token but the first (where there is no decoder at all)
    """

    replace: tuple[tuple[str, str], ...] = ()
    byte_level: bool = False
    byte_fallback: bool = False
    strip: str = ""
    mark: str = ""
    joint: str = ""


class PieceTable:
    """Table of the bytes that each token id adds to a text, computed on first use.

    An id outside the vocabulary adds nothing. Raises CheckpointError for a decoder of another kind.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int], file: str) -> None:
        self.special_ids = special_ids
        self._backend = backend
        self._rules = _read_decoder_rules(backend, file)
        self._pieces: dict[int, bytes] = {}
        self.errors = EACH_BYTE if self._rules.byte_fallback else "replace"

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of a token anywhere but at the beginning of a text."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._build(token_id, first=False)
        return piece

    def first(self, token_id: int) -> bytes:
        """Return the bytes of a token at the beginning of a text: some vocabularies drop a leading space there."""
        return self._build(token_id, first=True)

    def _build(self, token_id: int, *, first: bool) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        rules = self._rules
        if first and rules.mark:
            token = token.replace(rules.mark, "")
        for old, new in rules.replace:
            token = token.replace(old, new)
        piece = _to_bytes(token, rules)
        if first:
            return piece.removeprefix(rules.strip.encode())
        return rules.joint.encode() + piece


def _to_bytes(token: str, rules: _DecoderRules) -> bytes:
    if rules.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return token.encode()
    if rules.byte_level and all(char in _BYTE_OF_CHAR for char in token):
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 bytes are themselves, the other 68 follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


def _read_decoder_rules(backend: tokenizers.Tokenizer, file: str) -> _DecoderRules:
    if backend.decoder is None:
        return _DecoderRules(joint=" ")
    found: dict[str, Any] = {"replace": ()}
    growth = 1.0
    for part in _decoder_parts(json.loads(backend.decoder.__getstate__())):
        rule = _read_decoder_rule(part)
        if rule is None:
            raise CheckpointError(
                f"decoder {part.get('type')!r} with these settings is not supported; supported are ByteLevel, "
                "ByteFallback, Fuse, Metaspace, Replace of a string and Strip of one leading character",
                file=file,
                tensor="decoder",
            )
        found["replace"] += rule.pop("replace", ())
        growth *= _growth(part)
        found |= rule
    if growth > MAX_GROWTH:
        message = f"makes up to {growth:.3g} characters of one; at most {MAX_GROWTH} are accepted"
        raise CheckpointError(message, file=file, tensor="decoder")
    return _DecoderRules(**found)


def _decoder_parts(decoder: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if decoder.get("type") == "Sequence":
        for part in decoder["decoders"]:
            yield from _decoder_parts(part)
    else:
        yield decoder


def _read_decoder_rule(part: dict[str, Any]) -> dict[str, Any] | None:
    match part:
        case {"type": "ByteLevel"}:
            return {"byte_level": True}
        case {"type": "ByteFallback"}:
            return {"byte_fallback": True}
        case {"type": "Fuse"}:
            return {}
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return {"replace": ((old, new),)}
        case {"type": "Strip", "content": str(char), "start": 0 | 1 as start, "stop": 0}:
            return {"strip": char if start else ""}
        case {"type": "Metaspace", "replacement": str(mark)}:
            first = part.get("prepend_scheme", "always") != "never"
            return {"replace": ((mark, " "),), "mark": mark if first else ""}
    return None


def _growth(part: dict[str, Any]) -> float:
    if part["type"] != "Replace":
        return 1.0
    old, new = part["pattern"]["String"], part["content"]
    return max(1.0, len(new) / len(old)) if old else 1.0 + len(new)


class Detokenizer:
    """Stream from token ids to text; bytes that do not yet make a character wait inside.

    With `prompt_ids` the text continues that prompt: a leading space is kept and a character begun by the
    prompt is finished. Bytes that never become a character turn into U+FFFD. Only one thing differs from
    the `tokenizers` library's own decode: there, in a vocabulary with byte fallback, one bad byte spoils
    its whole run of byte tokens; here only itself, so that good characters need not wait for the run's end.
    """

    def __init__(self, pieces: PieceTable, *, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._pieces = pieces
        self._skipped: frozenset[int] = pieces.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(pieces.errors)
        self._at_start = True
        self.push(prompt_ids[-PROMPT_TAIL:])
        self._at_start = all(token_id in self._skipped for token_id in prompt_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that became complete with them."""
        if self._at_start:
            return self._utf8.decode(self._first(token_ids))
        skipped, piece = self._skipped, self._pieces.piece
        return self._utf8.decode(b"".join([piece(i) for i in token_ids if i not in skipped]))

    def flush(self) -> str:
        """Return the text that an unfinished character becomes at the end: U+FFFD."""
        return self._utf8.decode(b"", final=True)

    def _first(self, token_ids: Sequence[int]) -> bytes:
        shown = [token_id for token_id in token_ids if token_id not in self._skipped]
        if not shown:
            return b""
        self._at_start = False
        return self._pieces.first(shown[0]) + b"".join(map(self._pieces.piece, shown[1:]))
