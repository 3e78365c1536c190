"""Text to token ids and back, from a checkpoint's own tokenizer files."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from .chat_template import ChatTemplate, special_starts
from .detokenizer import Detokenizer, PieceTable
from .errors import CheckpointError, InvalidRequest
from .folder import is_there, open_file
from .messages import is_text
from .other_formats import explain_tokenizer
from .tokenizer_bounds import steps
from .tokenizer_files import CONFIG, DEFAULT, TOOL_USE, TokenizerConfig, read_text
from .tokenizer_plain import PlainTokenizer, plain_tokenizer
from .tools import Tool

__all__ = ["Tokenizer"]

FILE = "tokenizer.json"
OLDER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
LIBRARY_SUFFIXES = (".json", ".txt", ".model", ".jinja")  # what transformers reads of a tokenizer
MAX_FILE_BYTES = 512 * 2**20
SUBWORD_PREFIX = re.compile(r'"continuing_subword_prefix"\s*:\s*"[^"]')
SHOWN = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # marks in an answer, even where called special
LONG_CHARS = 4096  # a longer text takes more than about 1 ms
PROBE_CHARS = 8  # characters per allowed token that are tokenized before the rest of a long text is
PROBE_EDGES = 2  # tokens that a cut may add to a part of a text
PROBE_SLACK = 1.25  # how much a text's beginning may shrink once its rest is known: far more than it can


class Tokenizer:
    """A checkpoint's tokenizer. Made by `load`; safe to use from several threads.

    vocab_size         one more than the highest id
    special_ids        ids whose text is control, not content
    skipped_ids        those of them that decoding skips: all but the ids of SHOWN
    named_tokens       bos_token, eos_token and so on, as text; those that are set
    chat_template      None if the model has none
    tool_template      the one for chats with tools: of those that have a name "tool_use", else the same
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
        named = {**_implied(backend, config), **config.named}
        backend.no_truncation()  # a file may ask for either; the first loses text, the second invents it
        backend.no_padding()
        _add_missing(backend, config)
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = max([backend.get_vocab_size(with_added_tokens=True) - 1, *added]) + 1
        self.named_tokens = named
        _probe(backend, self.vocab_size)
        self.skipped_ids = self.special_ids - {i for i in self.special_ids if added[i].content in SHOWN}
        self._pieces = PieceTable(backend, self.skipped_ids, FILE)
        self._text_of = {i: added[i].content for i in self.special_ids}
        self._special = list(self._text_of.values())
        self._starts = special_starts(self._special)
        self._making = threading.Lock()
        self._made: PlainTokenizer | None = None
        templates = {
            name: ChatTemplate(source, file=file, special_tokens=named, literal=self._special)
            for name, (source, file) in config.templates.items()
            if name in (DEFAULT, TOOL_USE)
        }
        self.chat_template = templates.get(DEFAULT)
        self.tool_template = templates.get(TOOL_USE, self.chat_template)

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """Read a checkpoint folder. Raises CheckpointError naming the file."""
        folder = Path(folder)
        config = TokenizerConfig.read(folder)
        return cls(_read_backend(folder), config)

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a checkpoint folder holds a tokenizer at all; some hold weights only."""
        here = any(is_there(folder, name) for name in (FILE, *OLDER_FILES))
        return here or explain_tokenizer(folder) is not None

    @cached_property
    def longest_token_chars(self) -> int:
        """No token stands for more characters than this."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    @property
    def eos_token_id(self) -> int | None:
        """The id of its own end of sequence; None if it names none."""
        text = self.named_tokens.get("eos_token")
        return None if text is None else self.token_id(text)

    def turn_end(self) -> str | None:
        """The special token that the chat template writes right behind an assistant's turn; None if there is none."""
        behind = "" if self.chat_template is None else self.chat_template.text_behind_answer().lstrip()
        return max((text for text in self._special if behind.startswith(text)), key=len, default=None)

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def template_for(self, tools: Sequence[Tool]) -> ChatTemplate | None:
        """The one that a chat with these tools, or none, is rendered with."""
        return self.tool_template if tools else self.chat_template

    def token_id(self, text: str) -> int | None:
        """The id of a token given by its exact text, such as a special token."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        parse_special: bool = True,
        max_tokens: int | None = None,
        param: str = "prompt",
    ) -> list[int]:
        """Token ids of a text, in which the text of a special token is that token, unless `parse_special` is false.

        `max_tokens` refuses a text that is certainly longer, soon and without tokenizing all of it; a text
        slightly longer may pass. Raises InvalidRequest naming `param`.
        """
        if not is_text(text):
            raise InvalidRequest(f"{param} holds half of a surrogate pair, which is not text", param=param)
        backend = self._backend if parse_special or not self._holds_special(text) else self._plain.backend
        if max_tokens is not None:
            self._refuse_too_long(text, max_tokens, param, backend)
        return self._encode(text, add_special_tokens, backend)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        arguments: Mapping[str, bool | str] | None = None,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the model's own format, with `tools` as `check_tools` gives them.

        Text of a special token inside a message stays text. Raises InvalidRequest naming `messages`, with
        code "chat_template_missing" if the model has no template.
        """
        template = self.template_for(tools)
        if template is None:
            raise InvalidRequest(
                "this model has no chat template; use completions instead",
                param="messages",
                code="chat_template_missing",
            )
        pieces = template.render(
            messages, add_generation_prompt=add_generation_prompt, arguments=arguments, tools=tools
        )
        if len(pieces) == 1:
            return self.encode(pieces[0], add_special_tokens=False, max_tokens=max_tokens, param="messages")
        return self._encode_pieces(pieces, max_tokens, "messages")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these ids; bytes that are not UTF-8 become U+FFFD."""
        stream = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return stream.push(token_ids) + stream.flush()

    def detokenizer(self, *, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """A decoder for tokens that arrive one by one, behind `prompt_ids`."""
        return Detokenizer(self._pieces, prompt_ids=prompt_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes this id adds to a text; they need not be whole characters."""
        return self._pieces.piece(token_id)

    def token_text(self, token_id: int) -> str:
        """The same as text, incomplete characters as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _encode(self, text: str, add_special_tokens: bool, backend: tokenizers.Tokenizer | None = None) -> list[int]:
        backend = backend or self._backend
        if len(text) < LONG_CHARS:
            encoding = backend.encode(text, add_special_tokens=add_special_tokens)
        else:
            # Of the library's calls only those for batches let other threads run meanwhile.
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _holds_special(self, text: str) -> bool:
        return self._starts is not None and self._starts.search(text) is not None

    @property
    def _plain(self) -> PlainTokenizer:
        """Made when the first text comes that needs it: it takes as much memory as the tokenizer itself."""
        with self._making:
            if self._made is None:
                self._made = plain_tokenizer(self._backend, self._special)
            return self._made

    def _encode_pieces(self, pieces: Sequence[str], max_tokens: int | None, param: str) -> list[int]:
        """Ids of a text that is divided wherever it holds the text of a special token that is none.

        piece    ...text </s><s> text <|  /s> text, text <|  s> text </s>
                 |-open-|-marks-|------------- open -----------|-marks-|
        Between the template's own special tokens everything is encoded at once, as text.
        """
        ids: list[int] = []
        waiting: list[str] = []
        for piece in pieces:
            marks = self._marks(piece, max_tokens, param)
            waiting.append(piece if marks is None else piece[: marks.start])
            if marks is not None:
                ids += self._encode_open("".join(waiting), bool(ids), max_tokens, param)
                ids += marks.ids
                waiting = [piece[marks.end :]]
            if max_tokens is not None and len(ids) > max_tokens:
                raise _too_long(param, f"a part of it is {len(ids)} tokens, more than the {max_tokens}")
        return ids + self._encode_open("".join(waiting), bool(ids), max_tokens, param)

    def _marks(self, piece: str, max_tokens: int | None, param: str) -> _Marks | None:
        """From the first special token of a piece to its last one; what the client wrote holds none."""
        if not self._holds_special(piece):
            return None
        if max_tokens is not None:
            self._refuse_too_long(piece, max_tokens, param)
        (encoding,) = self._backend.encode_batch([piece], add_special_tokens=False)
        at = [
            i
            for i, (token_id, (start, end)) in enumerate(zip(encoding.ids, encoding.offsets, strict=True))
            if token_id in self.special_ids and piece[start:end].strip() == self._text_of[token_id].strip()
        ]  # an unknown character may have a special token's id, not its text
        if not at:
            return None
        first, last = at[0], at[-1]
        return _Marks(encoding.offsets[first][0], encoding.offsets[last][1], encoding.ids[first : last + 1])

    def _encode_open(self, text: str, inside: bool, max_tokens: int | None, param: str) -> list[int]:
        """Ids of text in which nothing is special, `inside` a longer one: behind a special token."""
        if not text:
            return []
        plain = self._plain
        if max_tokens is not None:
            self._refuse_too_long(text, max_tokens, param, plain.backend)
        if not inside:
            return self._encode(text, False, plain.backend)
        return self._encode(plain.anchor + text, False, plain.backend)[1:]

    def _refuse_too_long(
        self, text: str, max_tokens: int, param: str, backend: tokenizers.Tokenizer | None = None
    ) -> None:
        """Window by window, so that no more of a text is tokenized than it takes to know."""
        width = PROBE_CHARS * max_tokens
        if len(text) <= width:
            return
        count = 0
        for start in range(0, len(text), width):
            end = min(start + width, len(text))
            count += len(self._encode(text[start:end], False, backend)) - PROBE_EDGES
            if count > PROBE_SLACK * max_tokens:
                raise InvalidRequest(
                    f"{param}: {len(text)} characters are certainly more than the {max_tokens} tokens that the model "
                    f"can take; the first {end} characters alone are about {count} tokens",
                    param=param,
                    code="context_length_exceeded",
                )


class _Marks(NamedTuple):
    """Part of a text, from one special token to another, and its ids."""

    start: int
    end: int
    ids: list[int]


def _too_long(param: str, what: str) -> InvalidRequest:
    message = f"{param}: {what} that the model can take"
    return InvalidRequest(message, param=param, code="context_length_exceeded")


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    if not is_there(folder, FILE):
        return _convert(folder)
    text = read_text(folder, FILE, MAX_FILE_BYTES)
    if SUBWORD_PREFIX.search(text):  # the library ends the whole process when merges do not fit the prefix
        raise CheckpointError("continuing_subword_prefix is not supported", file=FILE, tensor="model")
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"not a tokenizer: {error}", file=FILE) from error


def _probe(backend: tokenizers.Tokenizer, vocab_size: int) -> None:
    """Some faults of a file show only when it is used: better now than in the first request."""
    try:
        ids = backend.encode("A probe: 1 é 中 😀", add_special_tokens=True).ids
    except BaseException as error:  # a panic in the library derives from nothing narrower
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise CheckpointError(f"cannot tokenize a short text: {error}", file=FILE) from error
    if max(ids, default=0) >= vocab_size:
        raise CheckpointError(f"gives id {max(ids)} beyond its own vocabulary of {vocab_size}", file=FILE)


def _convert(folder: Path) -> tokenizers.Tokenizer:
    """Older checkpoints have only a sentencepiece model or vocabulary files; transformers converts them."""
    if (error := explain_tokenizer(folder)) is not None:
        raise error
    if not any(is_there(folder, name) for name in OLDER_FILES):
        raise CheckpointError("missing; the folder holds no other tokenizer either", file=FILE)
    for name in sorted(entry.name for entry in folder.iterdir() if entry.suffix in LIBRARY_SUFFIXES):
        with open_file(folder, name):  # the library opens what it likes, without looking
            pass
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder), use_fast=True, trust_remote_code=False, local_files_only=True
        )
        backend: tokenizers.Tokenizer = tokenizer.backend_tokenizer
    except Exception as error:  # many kinds, none of them documented
        raise CheckpointError(f"missing, and transformers cannot make one: {error}", file=FILE) from error
    return tokenizers.Tokenizer.from_str(backend.to_str())


def _implied(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> dict[str, str]:
    """Names of tokens that the files beside tokenizer.json leave out, as far as the vocabulary has such tokens."""
    padding = backend.padding
    implied = {**config.implied, **({"pad_token": str(padding["pad_token"])} if padding else {})}
    return {name: text for name, text in implied.items() if backend.token_to_id(text) is not None}


def _add_missing(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Tokens that only the files beside tokenizer.json know, and what they say otherwise of those that it has."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    known = backend.get_added_tokens_decoder()
    for token_id, entry in config.added.items():
        chosen = {flag: bool(entry[flag]) for flag in flags if flag in entry}
        token = tokenizers.AddedToken(entry["content"], **chosen)
        if token_id in known and repr(known[token_id]) == repr(token):
            continue
        if config.added_file != CONFIG and token_id in known and known[token_id].content == token.content:
            continue  # tokenizer.json says more of it
        backend.add_tokens([token])
        if backend.token_to_id(entry["content"]) != token_id:
            raise CheckpointError(
                f"token {entry['content']!r} cannot have id {token_id}: {FILE} gives it another",
                file=config.added_file,
                tensor="added_tokens_decoder" if config.added_file == CONFIG else "",
            )
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for text in config.special:
        if text not in special:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])
    if _makes_other_text(backend.normalizer):
        _find_as_written(backend)


def _makes_other_text(normalizer: Any) -> bool:
    """Whether a normalizer could make a special token's text of another one, such as `<s>` of full-width letters."""
    if normalizer is None:
        return False
    return not all(map(_spaces_only, steps(json.loads(normalizer.__getstate__()))))


def _spaces_only(normalizer: dict[str, Any]) -> bool:
    match normalizer:
        case {"type": "Prepend" | "Strip"} | {"type": "Replace", "pattern": {"String": " "}}:
            return True
    return False


def _find_as_written(backend: tokenizers.Tokenizer) -> None:
    """A special token counts where it is written, never in what a normalizer makes of a client's text."""
    for token in backend.get_added_tokens_decoder().values():
        if token.special and token.normalized:
            flags = {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip")}
            backend.add_special_tokens([tokenizers.AddedToken(token.content, special=True, normalized=False, **flags)])
