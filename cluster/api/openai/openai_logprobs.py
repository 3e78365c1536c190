"""Log-probabilities in both of OpenAI's forms."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ....replicas.text.tokenizer.tokenizer import Tokenizer
from ....replicas.types import PromptLogprob, TokenLogprob
from ...transport.http_server.response_content import JsonObject

NO_PROBABILITY = -9999.0  # what OpenAI writes for minus infinity, which JSON cannot


class TextOffsets:
    """Offsets at which tokens begin in a text, in characters. A token inside a character begins where the character
    does.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, start: int = 0, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._stream = tokenizer.detokenizer(prompt_ids=prompt_ids, skip_special_tokens=skip_special_tokens)
        self._at = start

    def push(self, ids: Sequence[int]) -> list[int]:
        offsets = []
        for token_id in ids:
            offsets.append(self._at)
            self._at += len(self._stream.push((token_id,)))
        return offsets


class LogprobWriter:
    """Names of tokens: their text by one tokenizer, or their ids if `by_id`."""

    def __init__(self, tokenizer: Tokenizer, *, by_id: bool = False) -> None:
        self.tokenizer = tokenizer
        self._by_id = by_id

    def legacy(self, ids: Sequence[int], entries: Sequence[PromptLogprob], offsets: Sequence[int]) -> JsonObject:
        """Return log-probabilities in the form of completions: parallel lists. The token itself is always among its
        alternatives.
        """
        return {
            "tokens": [self._name(token_id) for token_id in ids],
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": list(offsets),
        }

    def content(self, entries: Sequence[TokenLogprob] | None) -> JsonObject | None:
        """Return log-probabilities in the form of chats: one object for each token, those of reasoning and calls
        included.
        """
        if entries is None:
            return None
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _name(self, token_id: int) -> str:
        """Return a token's text, or its bytes if they are no whole characters: two such tokens must not look the
        same.
        """
        if self._by_id:
            return f"token_id:{token_id}"
        data = self.tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _top(self, entry: PromptLogprob) -> dict[str, float] | None:
        if entry is None:
            return None
        named = {self._name(token_id): _finite(logprob) for token_id, logprob in entry.top}
        return named | {self._name(entry.token_id): _finite(entry.logprob)}

    def _entry(self, entry: TokenLogprob) -> JsonObject:
        top = [self._one(token_id, logprob) for token_id, logprob in entry.top]
        return self._one(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _one(self, token_id: int, logprob: float) -> JsonObject:
        data = self.tokenizer.token_bytes(token_id)
        name = f"token_id:{token_id}" if self._by_id else data.decode(errors="replace")
        return {"token": name, "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else NO_PROBABILITY
