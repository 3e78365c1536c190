"""Tokenizer: text to token ids and back, from a checkpoint's own tokenizer files."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from ...checkpoint.files.checkpoint_folder import has_entry
from ...checkpoint.files.unsupported_formats import explain_tokenizer
from ...errors import InvalidRequest
from ..chat.chat_messages import check_messages, is_text
from ..chat.chat_template import ChatTemplate
from ..chat.tool_definitions import Tool
from ..jinja.bounded_template import TemplateTimeout
from ..special_token_search import special_token_starts
from .detokenizer import Detokenizer, PieceTable
from .plain_tokenizer import PlainTokenizer, plain_tokenizer
from .regex_cost import has_long_runs
from .tokenizer_backend import (
    OLDER_FILES,
    TOKENIZER_FILE,
    add_missing_tokens,
    decode_only_state,
    implied_tokens,
    library_refusal,
    load_backend,
    probe_tokenizer,
    read_tokenizer_state,
)
from .tokenizer_cost import find_unbounded_component, normalizer_growth, slow_on_long_runs
from .tokenizer_files import DEFAULT_TEMPLATE, TOOL_USE_TEMPLATE, TokenizerConfig
from .tokenizer_process import TokenizerProcess

__all__ = ["TOKENIZER_FILE", "Tokenizer"]

log = logging.getLogger(__name__)

VISIBLE_SPECIAL_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)  # marks shown in a response, even if special tokens
LONG_CHARS = 4096  # a longer text takes more than about 1 ms
# CPU seconds that a chat's template may take before another process renders it. Real ones take 0.15 ms a message and
# 1.1 ms a tool, on a slow machine a few times as much.
QUICK_S = 0.1
QUICK_MESSAGE_S = 0.001
QUICK_TOOL_S = 0.005
MAX_QUICK_S = 0.5
WARY_PERIOD_S = 10.0  # for so long after a slow template, each has WARY_BASE_S and half the time per message and tool
WARY_BASE_S = 0.01
PROBE_CHARS = 8  # characters per allowed token that are tokenized before the rest of a long text is
MIN_PROBE_TOKENS = 1024  # least characters of a window, where a normalizer may make many characters of one
PROBE_EDGES = 2  # tokens that a cut may add to a part of a text
PROBE_SLACK = 1.25  # how much a text's beginning may shrink once its rest is known: far more than it can


class Tokenizer:
    """A checkpoint's tokenizer. Made by `load`; safe to use from several threads.

    If nothing is known to bound the time or memory of its file, texts are read in a process of their own; so are a chat
    whose template takes long, and a text whose white space makes the tokenizer's expressions take long.

    vocab_size         one more than the highest id
    special_ids        ids whose text is control, not content
    skipped_ids        special ids that decoding skips: all but the ids of VISIBLE_SPECIAL_TOKENS
    named_tokens       bos_token, eos_token and so on, as text; those that are set
    chat_template      None if the model has none
    tool_template      template for chats with tools: the one named "tool_use", if there is one, else the same
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: TokenizerConfig,
        *,
        aside: TokenizerProcess | None,
        doubtful: bool,
        minds_long_runs: bool = False,
        growth: float = 1.0,
    ) -> None:
        named = {**implied_tokens(backend, config), **config.named}
        backend.no_truncation()  # a file may ask for truncation, which loses text, or padding, which invents it
        backend.no_padding()
        if getattr(backend.model, "dropout", None):
            backend.model.dropout = None  # only for training: it would give a text other ids each time
        backend = add_missing_tokens(backend, config)
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = max([backend.get_vocab_size(with_added_tokens=True) - 1, *added]) + 1
        self.named_tokens = named
        self._aside = aside
        self._always_aside = doubtful
        self._minds_long_runs = minds_long_runs
        self._growth = growth
        if doubtful and aside is not None:
            aside.start()
        else:
            probe_tokenizer(backend, self.vocab_size)
        self.skipped_ids = self.special_ids - {
            i for i in self.special_ids if added[i].content in VISIBLE_SPECIAL_TOKENS
        }
        self._pieces = PieceTable(backend, self.skipped_ids, TOKENIZER_FILE)
        self._text_of = {i: added[i].content for i in self.special_ids}
        self._special = list(self._text_of.values())
        self._starts = special_token_starts(self._special)
        self._making = threading.Lock()
        self._made: PlainTokenizer | None = None
        templates = {
            name: ChatTemplate(
                source, file=file, special_tokens=named, literal=self._special, own_process=aside is not None
            )
            for name, (source, file) in config.templates.items()
            if name in (DEFAULT_TEMPLATE, TOOL_USE_TEMPLATE)
        }
        self.chat_template = templates.get(DEFAULT_TEMPLATE)
        self.tool_template = templates.get(TOOL_USE_TEMPLATE, self.chat_template)
        self._rendering = threading.Lock()
        self._slow_until = 0.0

    @classmethod
    def load(cls, folder: Path | str, *, aside: bool = True) -> Tokenizer:
        """Read a checkpoint folder. Raises CheckpointError naming the file.

        aside: whether another process may be used. Without one everything is done here, however long it takes.
        """
        folder = Path(folder)
        config = TokenizerConfig.read(folder)
        text, state = read_tokenizer_state(folder)
        doubt = find_unbounded_component(state) if aside else None
        if doubt is not None:
            log.warning("%s: texts are tokenized in a separate process, because of its %s: %s", TOKENIZER_FILE, *doubt)
        backend = load_backend(text, state) if doubt is None else load_backend(*decode_only_state(state))
        beside = TokenizerProcess(folder, "" if doubt is None else doubt[0]) if aside else None
        runs = doubt is None and beside is not None and slow_on_long_runs(state)
        growth = normalizer_growth(state) if aside and doubt is None else 1.0
        return cls(backend, config, aside=beside, doubtful=doubt is not None, minds_long_runs=runs, growth=growth)

    def prepare(self) -> None:
        """Make now what would otherwise be made for the first text that needs it."""
        if self._starts is not None:
            assert self._plain

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Return whether a checkpoint folder holds a tokenizer at all; some hold weights only."""
        here = any(has_entry(folder, name) for name in (TOKENIZER_FILE, *OLDER_FILES))
        return here or explain_tokenizer(folder) is not None

    @cached_property
    def longest_token_chars(self) -> int:
        """Most characters that a single token stands for."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    @property
    def uses_own_process(self) -> bool:
        """Whether each text is read in a process of its own, which `encode` and `chat` then wait for."""
        return self._always_aside

    @property
    def eos_token_id(self) -> int | None:
        """Id of the tokenizer's own end of sequence; None if it names none."""
        text = self.named_tokens.get("eos_token")
        return None if text is None else self.token_id(text)

    def turn_end(self) -> str | None:
        """Return the special token that the chat template writes right behind an assistant's turn; None if there is
        none.
        """
        behind = "" if self.chat_template is None else self.chat_template.text_after_generation().lstrip()
        return max((text for text in self._special if behind.startswith(text)), key=len, default=None)

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def rest(self) -> None:
        """End the processes that render chats, where few or none are rendered. The next chat starts them again."""
        for template in (self.chat_template, self.tool_template):
            if template is not None:
                template.rest()

    def template_for(self, tools: Sequence[Tool]) -> ChatTemplate | None:
        """Return the template for a chat with these tools, or without any."""
        return self.tool_template if tools else self.chat_template

    def token_id(self, text: str) -> int | None:
        """Return the id of a token given by its exact text, such as a special token."""
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
        """Return the token ids of a text, in which the text of a special token is that token unless `parse_special` is
        false.

        `max_tokens` refuses a text that is certainly longer, early and without tokenizing all of it; a text
        slightly longer may pass. Raises InvalidRequest naming `param`.
        """
        arguments: dict[str, Any] = {"parse_special": parse_special, "max_tokens": max_tokens, "param": param}
        return _wait_for_ids(self.begin_encode(text, add_special_tokens, **arguments))

    def begin_encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        parse_special: bool = True,
        max_tokens: int | None = None,
        param: str = "prompt",
        tenant: str = "",
    ) -> list[int] | Future[list[int]]:
        """Encode like `encode`, but return a future for a text that another process reads, in `tenant`'s turn."""
        if not is_text(text):
            raise InvalidRequest(f"{param} holds half of a surrogate pair, which is not text", param=param)
        if self._aside is not None and self._needs_own_process(text):
            given: dict[str, Any] = {"text": text, "add_special_tokens": add_special_tokens, "param": param}
            given |= {"max_tokens": max_tokens, "parse_special": parse_special}
            return self._aside.begin("encode", given, tenant=tenant, param=param, too_much=_too_complex_text(param))
        backend = self._backend if parse_special or not self._holds_special(text) else self._plain.backend
        if max_tokens is not None:
            self._refuse_too_long(text, max_tokens, param, backend)
        return self._encode(text, add_special_tokens, backend, param)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        arguments: Mapping[str, bool | str] | None = None,
        tools: Sequence[Tool] = (),
        continue_final_message: bool = False,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation in the model's own format, with `tools` as `check_tools` returns them.

        `continue_final_message`: the ids end with the last message's text, for the model to continue it. Text of a
        special token inside a message stays text. Raises InvalidRequest naming `messages`, with code
        "chat_template_missing" if the model has no template.
        """
        given: dict[str, Any] = {"arguments": arguments, "tools": tools, "max_tokens": max_tokens}
        given["continue_final_message"] = continue_final_message
        return _wait_for_ids(self.begin_chat(messages, add_generation_prompt, **given))

    def begin_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        arguments: Mapping[str, bool | str] | None = None,
        tools: Sequence[Tool] = (),
        continue_final_message: bool = False,
        max_tokens: int | None = None,
        tenant: str = "",
    ) -> list[int] | Future[list[int]]:
        """Encode a chat like `chat`, but return a future for one that another process reads, in `tenant`'s turn."""
        template = self.template_for(tools)
        if template is None:
            raise InvalidRequest(
                "this model has no chat template; use completions instead",
                param="messages",
                code="chat_template_missing",
            )
        given: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "arguments": arguments, "tools": tools}
        given["continue_final_message"] = continue_final_message
        if self._always_aside:
            check_messages(messages)
        pieces = None if self._always_aside else self._render_soon(template, messages, given)
        if self._aside is not None and (pieces is None or self._needs_own_process("".join(pieces))):
            given |= {"messages": messages, "max_tokens": max_tokens}
            too_much = (
                _too_slow_template() if pieces is None and not self._always_aside else _too_complex_text("messages")
            )
            return self._aside.begin("chat", given, tenant=tenant, param="messages", too_much=too_much)
        assert pieces is not None
        if len(pieces) == 1:
            return self.encode(pieces[0], add_special_tokens=False, max_tokens=max_tokens, param="messages")
        return self._encode_pieces(pieces, max_tokens, "messages")

    def spellings(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the distinct token sequences that spell these texts, each with and without a space before it: at a
        text's beginning and, if the tokenizer has a special token, also inside one."""
        found: dict[tuple[int, ...], None] = {}
        for text in texts:
            if self._needs_own_process(text):
                raise _too_complex_text("bad_words")
            for written in (text, f" {text}"):
                found[tuple(self._encode(written, False, param="bad_words"))] = None
                if self._special:  # without a special token to put before it, its form inside a text is unknown
                    found[tuple(self._encode_open(written, True, None, "bad_words"))] = None
        found.pop((), None)
        return tuple(found)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of these ids; bytes that are not UTF-8 become U+FFFD."""
        stream = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return stream.push(token_ids) + stream.flush()

    def detokenizer(self, *, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """Return a decoder for tokens that arrive one by one, behind `prompt_ids`."""
        return Detokenizer(self._pieces, prompt_ids=prompt_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes that this id adds to a text; they need not be whole characters."""
        return self._pieces.piece(token_id)

    def token_text(self, token_id: int) -> str:
        """Return the text of this id's bytes, with incomplete characters as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _render_soon(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any]
    ) -> list[str] | None:
        """Return the pieces of a chat; None if its template takes longer than other requests should wait for.

        One chat is rendered at a time, since the interpreter runs one thread at once, and each further one would delay
        all others.
        """
        if self._aside is None:
            return template.render(messages, **given)
        with self._rendering:
            count = len(messages) if isinstance(messages, Sequence) else 0  # rendering refuses anything but a list
            template.quick_s = _quick_s(count, len(given["tools"]), wary=time.monotonic() < self._slow_until)
            try:
                return template.render(messages, **given)
            except TemplateTimeout:
                self._slow_until = time.monotonic() + WARY_PERIOD_S
                return None

    def _needs_own_process(self, text: str) -> bool:
        return self._always_aside or (self._minds_long_runs and has_long_runs(text))

    def _encode(
        self,
        text: str,
        add_special_tokens: bool,
        backend: tokenizers.Tokenizer | None = None,
        param: str = "prompt",
    ) -> list[int]:
        backend = backend or self._backend
        try:
            if len(text) < LONG_CHARS:
                encoding = backend.encode(text, add_special_tokens=add_special_tokens)
            else:
                # Only the library's calls for batches let other threads run meanwhile.
                (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except BaseException as error:
            raise library_refusal(error, param) from error
        ids: list[int] = encoding.ids
        return ids

    def _holds_special(self, text: str) -> bool:
        return self._starts is not None and self._starts.search(text) is not None

    @property
    def _plain(self) -> PlainTokenizer:
        """Tokenizer without special tokens, made for the first text that needs it: it takes as much memory as the
        tokenizer itself.
        """
        with self._making:
            if self._made is None:
                self._made = plain_tokenizer(self._backend, self._special)
            return self._made

    def _encode_pieces(self, pieces: Sequence[str], max_tokens: int | None, param: str) -> list[int]:
        """Return the ids of a text that is divided wherever it holds the text of a special token that is not meant as
        one.

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
                raise _too_long(param, f"a part of it is {len(ids)} tokens", max_tokens)
        return ids + self._encode_open("".join(waiting), bool(ids), max_tokens, param)

    def _marks(self, piece: str, max_tokens: int | None, param: str) -> _SpecialSpan | None:
        """Return the part from a piece's first special token to its last one; what the client wrote holds none. None:
        no token.
        """
        if not self._holds_special(piece):
            return None
        if max_tokens is not None:
            self._refuse_too_long(piece, max_tokens, param)
        try:
            (encoding,) = self._backend.encode_batch([piece], add_special_tokens=False)
        except BaseException as error:
            raise library_refusal(error, param) from error
        at = [
            i
            for i, (token_id, (start, end)) in enumerate(zip(encoding.ids, encoding.offsets, strict=True))
            if token_id in self.special_ids and piece[start:end].strip() == self._text_of[token_id].strip()
        ]  # an unknown character may have a special token's id, not its text
        if not at:
            return None
        first, last = at[0], at[-1]
        return _SpecialSpan(encoding.offsets[first][0], encoding.offsets[last][1], encoding.ids[first : last + 1])

    def _encode_open(self, text: str, inside: bool, max_tokens: int | None, param: str) -> list[int]:
        """Return the ids of text in which nothing is special. `inside`: it stands behind a special token of a longer
        text.
        """
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
        """Raise InvalidRequest for a text that is too long, tokenizing it window by window, and only as far as
        needed.
        """
        width = PROBE_CHARS * max_tokens
        if self._growth > 1:  # else one window of text could become gigabytes of tokens
            width = min(width, max(MIN_PROBE_TOKENS, int(width / self._growth)))
        if len(text) <= width:
            return
        count = 0
        for start in range(0, len(text), width):
            end = min(start + width, len(text))
            count += len(self._encode(text[start:end], False, backend)) - PROBE_EDGES
            if count > PROBE_SLACK * max_tokens:
                what = f"{len(text)} characters are certainly too many: the first {end} alone are about {count} tokens"
                raise _too_long(param, what, max_tokens)


class _SpecialSpan(NamedTuple):
    """Part of a text, from one special token to another, and its ids."""

    start: int
    end: int
    ids: list[int]


def _too_long(param: str, what: str, max_tokens: int) -> InvalidRequest:
    """Return the error for a text that is too long, in OpenAI's words, by which client libraries recognise it."""
    message = f"{param}: {what}. This model's maximum context length is {max_tokens} tokens"
    return InvalidRequest(message, param=param, code="context_length_exceeded")


def _too_complex_text(param: str) -> InvalidRequest:
    message = f"{param}: the model's tokenizer takes more time or memory for it than one request may use"
    return InvalidRequest(message, param=param, code="tokenizer_limit")


def _too_slow_template() -> InvalidRequest:
    message = "messages: rendering them was stopped: the chat template takes more time or memory than it may"
    return InvalidRequest(message, param="messages", code="chat_template_limit")


def _quick_s(messages: int, tools: int, *, wary: bool) -> float:
    """Return the CPU seconds that a chat's template may take in this process, for that many messages and tools.

    wary  whether a template was slow lately, so that each has less time
    """
    quick_s = QUICK_MESSAGE_S * messages + QUICK_TOOL_S * tools
    return min(WARY_BASE_S + quick_s / 2 if wary else QUICK_S + quick_s, MAX_QUICK_S)


def _wait_for_ids(ids: list[int] | Future[list[int]]) -> list[int]:
    return ids.result() if isinstance(ids, Future) else ids
