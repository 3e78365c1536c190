"""Sampling parameters, validated by construction: the one validator behind gRPC, HTTP and Python."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .errors import InvalidRequest
from .grammar.grammar_spec import GrammarSpec
from .short_repr import short_repr

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_ALL_STOP_CHARS = 4096  # of all stop strings of a request: their automaton is built while others wait
MAX_LOGIT_BIAS = 300
MAX_ALLOWED_IDS = 65_536
MAX_BAD_WORDS = 100
MAX_BAD_WORD_CHARS = 256
MAX_TEMPERATURE = 100.0
SEED_RANGE = (-(2**63), 2**63 - 1)


class TokenIds(tuple[int, ...]):
    """Token ids that every step of a request uses."""

    @cached_property
    def others(self) -> bytearray:
        """One byte for each id up to the largest: 1 if the id is not in the tuple. Made once, since many ids take
        milliseconds.
        """
        found = bytearray(b"\1") * (max(self, default=-1) + 1)
        for token_id in self:
            found[token_id] = 0
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of how tokens are chosen and when a choice ends.

    temperature         0 is greedy. 0 to 100
    top_k               keep the k most likely; 0 or -1 keeps all
    top_p               keep the smallest set with this much probability, (0, 1]
    min_p               drop tokens below this fraction of the best one's probability, [0, 1]
    presence_penalty    subtracted once from the logit of any token in the output, [-2, 2]
    frequency_penalty   subtracted per occurrence in the output, [-2, 2]
    repetition_penalty  divides positive and multiplies negative logits of tokens in prompt or output, (0, 10]
    logit_bias          token id -> added to its logit, [-100, 100], or False: it is never chosen; at most 300 ids
    seed                the same seed repeats the same text; for None and -1 the ingress draws a seed
    n                   number of choices
    logprobs            None, or how many alternatives beside each output token's own log-probability, 0 to 20
    prompt_logprobs     None, or how many alternatives beside each prompt token's own log-probability, 0 to 20
    min_tokens          no end-of-sequence or stop before this many
    max_tokens          None: until the context is full
    stop                strings that end a choice and are not part of its text; at most 64, of 4,096 characters together
    stop_token_ids      ids that end a choice
    ignore_eos          go on past end-of-sequence ids
    grammar             what the text of each choice must follow. Its end is the choice's end (finish reason stop),
                        whatever min_tokens and ignore_eos say; until then stop strings, stop ids and max_tokens
                        cut it short as they do any text, and an end-of-sequence id is possible only where the text
                        may end. Bias and penalties act on the tokens that the grammar allows
    skip_special_tokens leave special tokens out of the text, and out of what is searched for stop strings
    include_stop_str_in_output  the stop string, or the text of the stop id, that ends a choice is the end of its text
    allowed_token_ids   no other token is chosen, an end-of-sequence id neither; empty: all are allowed. Not with a
                        grammar
    bad_words           texts whose tokens, as the tokenizer writes each with and without a space before it, are never
                        chosen one after the other in the output; other tokens may spell the same text

    Raises InvalidRequest naming the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    grammar: GrammarSpec | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        _integer("n", self.n, 1, MAX_CHOICES)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _optional_integer("seed", self.seed, *SEED_RANGE)
        _optional_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _optional_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _optional_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, getattr(self, name), "true or false")
        if self.grammar is not None and not isinstance(self.grammar, GrammarSpec):
            raise _invalid("grammar", self.grammar, "a GrammarSpec")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        allowed = _ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_IDS)
        if allowed and self.grammar is not None:
            raise _invalid("allowed_token_ids", allowed, "no value beside a grammar")
        object.__setattr__(self, "allowed_token_ids", TokenIds(allowed))
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def biases(self) -> dict[int, float]:
        """Numbers that are added to logits, by token id: minus infinity for an id that is never chosen."""
        return {token_id: -math.inf if bias is False else bias for token_id, bias in self.logit_bias.items()}

    @property
    def penalised(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequest if an id is not in a vocabulary of that size."""
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            ids = getattr(self, name)
            for token_id in ids:
                if token_id >= vocab_size:
                    raise _invalid(name, token_id, f"ids below the vocabulary size, {vocab_size}")
        if sum(1 for bias in self.logit_bias.values() if bias is False) == vocab_size:
            raise _invalid("logit_bias", False, "a token at least that may be chosen")


def _invalid(name: str, value: Any, accepted: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name}: {short_repr(value)} is not accepted; expected {accepted}", param=name, code="invalid_value"
    )


def _number(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    bounds = f"a number in {'(' if low_open else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _invalid(name, value, bounds)
    if not (low <= value <= high) or (low_open and value == low) or math.isnan(value):
        raise _invalid(name, value, bounds)


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _invalid(name, value, f"an integer from {low} to {high}")


def _optional_integer(name: str, value: Any, low: int, high: int) -> None:
    if value is not None:
        _integer(name, value, low, high)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple) or len(strings) > MAX_STOP_STRINGS:
        raise _invalid("stop", stop, f"a string or at most {MAX_STOP_STRINGS} strings")
    for text in strings:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
            raise _invalid("stop", text, f"strings of 1 to {MAX_STOP_CHARS} characters")
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise _invalid("stop", text, "text without lone surrogates")
    if (total := sum(map(len, strings))) > MAX_ALL_STOP_CHARS:
        raise _invalid("stop", stop, f"at most {MAX_ALL_STOP_CHARS} characters in all strings, which have {total}")
    return tuple(strings)


def _ids(name: str, ids: Any, max_ids: int = MAX_LOGIT_BIAS) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple) or len(ids) > max_ids:
        raise _invalid(name, ids, f"a list of at most {max_ids} token ids")
    for token_id in ids:
        _integer(name, token_id, 0, 2**31 - 1)
    return tuple(ids)


def _bad_words(texts: Any) -> tuple[str, ...]:
    if not isinstance(texts, list | tuple) or len(texts) > MAX_BAD_WORDS:
        raise _invalid("bad_words", texts, f"a list of at most {MAX_BAD_WORDS} texts")
    for word in texts:
        if not isinstance(word, str) or not 1 <= len(word) <= MAX_BAD_WORD_CHARS:
            raise _invalid("bad_words", word, f"texts of 1 to {MAX_BAD_WORD_CHARS} characters")
        if any("\ud800" <= char <= "\udfff" for char in word):
            raise _invalid("bad_words", word, "text without lone surrogates")
    return tuple(texts)


def _logit_bias(bias: Any) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, Mapping) or len(bias) > MAX_LOGIT_BIAS:
        raise _invalid("logit_bias", bias, f"an object of at most {MAX_LOGIT_BIAS} token ids")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11 else key
        _integer("logit_bias", token_id, 0, 2**31 - 1)
        if value is not False:
            _number("logit_bias", value, -100.0, 100.0)
        if token_id in checked:
            raise _invalid("logit_bias", key, f"each token id once, and {token_id} was there before")
        checked[token_id] = value if value is False else float(value)
    return checked
