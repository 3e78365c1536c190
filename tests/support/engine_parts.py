"""Parts that an engine needs beside a runner, made small: a tokenizer and a clock."""

from __future__ import annotations

from typing import Any


class Letters:
    """A tokenizer of one letter per id."""

    def detokenizer(self, **_: Any) -> Letters:
        return self

    def push(self, token_ids: Any) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)

    uses_own_process = False

    def spellings(self, texts: Any) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(ord(letter) - ord("a") for letter in text) for text in texts)

    def flush(self) -> str:
        return ""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now
