"""Deltas and gathered choices -> OpenAI's objects, whole and in chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from ...replicas.protocol import Delta, PromptLogprob, TokenLogprob
from ...replicas.tokenizer import Tokenizer
from ..ask import Admitted
from ..gather import Gathered, GatheredChoice

NO_PROBABILITY = -9999.0  # what OpenAI writes for minus infinity, which JSON cannot


Object = dict[str, Any]


class Form(Protocol):
    """What differs between completions and chat."""

    prefix: str
    object: str
    chunk_object: str

    def choice(self, choice: GatheredChoice, prompt: Echo | None) -> Object: ...

    def opening(self, prompt: Echo | None) -> Object | None: ...

    def delta(self, delta: Delta, offset: int) -> Object: ...

    def chars(self, delta: Delta) -> int: ...


class Echo:
    """A prompt to be repeated before its completion."""

    def __init__(self, text: str, ids: Sequence[int], logprobs: Sequence[PromptLogprob] | None) -> None:
        self.text = text
        self.ids = ids
        self.logprobs = logprobs


class CompletionForm:
    prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def choice(self, choice: GatheredChoice, prompt: Echo | None) -> Object:
        text, entries = choice.text, _optional_list(choice.logprobs)
        ids: list[int] = list(choice.token_ids)
        if prompt is not None:
            text = prompt.text + text
            if entries is not None:
                entries = list(prompt.logprobs or ()) + entries
                ids = [*prompt.ids, *ids]
        return _ended({"text": text, "logprobs": self._tokens.legacy(ids, entries, 0)}, choice)

    def opening(self, prompt: Echo | None) -> Object | None:
        if prompt is None:
            return None
        entries = _optional_list(prompt.logprobs)
        return {"text": prompt.text, "logprobs": self._tokens.legacy(prompt.ids, entries, 0)} | _UNENDED

    def delta(self, delta: Delta, offset: int) -> Object:
        entries = _optional_list(delta.logprobs)
        return _ended({"text": delta.text, "logprobs": self._tokens.legacy(delta.token_ids, entries, offset)}, delta)

    def chars(self, delta: Delta) -> int:
        """Characters of its tokens, as `text_offset` counts them; only log-probabilities need it."""
        return sum(len(self._tokens.text(i)) for i in delta.token_ids) if delta.logprobs is not None else 0


class ChatForm:
    prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def choice(self, choice: GatheredChoice, prompt: Echo | None) -> Object:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return _ended({"message": message, "logprobs": self._tokens.content(choice.logprobs)}, choice)

    def opening(self, prompt: Echo | None) -> Object | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None} | _UNENDED

    def delta(self, delta: Delta, offset: int) -> Object:
        content = {"content": delta.text} if delta.text else {}
        return _ended({"delta": content, "logprobs": self._tokens.content(delta.logprobs)}, delta)

    def chars(self, delta: Delta) -> int:
        return 0


_UNENDED: dict[str, Any] = {"finish_reason": None}


def _ended(fields: dict[str, Any], of: Delta | GatheredChoice) -> Object:
    reason = of.finish_reason
    ended: dict[str, Any] = {"finish_reason": None if reason is None else str(reason)}
    if of.stop_reason is not None:
        ended["stop_reason"] = of.stop_reason
    return fields | ended


class Tokens:
    """Log-probabilities in both of OpenAI's forms."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")

    def legacy(self, ids: Sequence[int], entries: Sequence[PromptLogprob] | None, offset: int) -> Object | None:
        """Completions: parallel lists. `offset` is where the first token's text begins."""
        if entries is None:
            return None
        texts = [self.text(token_id) for token_id in ids]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: PromptLogprob) -> dict[str, float] | None:
        if entry is None:
            return None
        return {self.text(token_id): _finite(logprob) for token_id, logprob in entry.top}

    def content(self, entries: Sequence[TokenLogprob] | None) -> Object | None:
        """Chat: one object for each token."""
        if entries is None:
            return None
        return {"content": [self.entry(entry) for entry in entries], "refusal": None}

    def entry(self, entry: TokenLogprob) -> Object:
        top = [self._one(token_id, logprob) for token_id, logprob in entry.top]
        return self._one(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _one(self, token_id: int, logprob: float) -> Object:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else NO_PROBABILITY


def _optional_list(entries: Sequence[PromptLogprob] | None) -> list[PromptLogprob] | None:
    return None if entries is None else list(entries)


def usage(admitted: Sequence[Admitted], completion_tokens: int, cached_tokens: int) -> Object:
    prompt_tokens = sum(len(one.request.prompt_ids) for one in admitted)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def head(form: Form, first: Admitted, object_name: str) -> Object:
    return {
        "id": form.prefix + first.request.request_id,
        "object": object_name,
        "created": first.created,
        "model": first.model,
    }


def whole(
    form: Form, admitted: Sequence[Admitted], gathered: Sequence[Gathered], echoes: Sequence[Echo | None]
) -> Object:
    choices: list[dict[str, Any]] = []
    for answer, prompt in zip(gathered, echoes, strict=True):
        for choice in answer.choices:
            choices.append({"index": len(choices)} | form.choice(choice, prompt))
    tokens = sum(answer.completion_tokens for answer in gathered)
    cached = sum(answer.cached_tokens for answer in gathered)
    return head(form, admitted[0], form.object) | {"choices": choices, "usage": usage(admitted, tokens, cached)}
