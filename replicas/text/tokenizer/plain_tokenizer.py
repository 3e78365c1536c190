"""Tokenizer without special tokens: everything in a text is text to it."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import tokenizers

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # token for a byte in a model with byte fallback, which text needs


class PlainTokenizer(NamedTuple):
    """Tokenizer without special tokens. anchor: a token that no text can hold; text behind it is encoded as behind any
    special token.
    """

    backend: tokenizers.Tokenizer
    anchor: str


def plain_tokenizer(backend: tokenizers.Tokenizer, special: Iterable[str]) -> PlainTokenizer:
    """Return a copy in which special tokens keep their ids and have names that no client can write.

    Neither the search for added tokens nor the model itself can then make a special token of a text: a unigram
    model, say, has them among its pieces. Ids of texts that hold no special token's text are the same.
    """
    state = json.loads(backend.to_str())
    nonce = secrets.token_hex(8)
    texts = [text for text in special if not _BYTE.fullmatch(text)]
    names = {text: f"\ufdd0{nonce}{i}\ufdd1" for i, text in enumerate(texts)}
    for token in state["added_tokens"]:
        if token["content"] in names:
            token |= {"content": names[token["content"]], "single_word": False, "lstrip": False, "rstrip": False}
            token["normalized"] = False
    _rename(state["model"], names)
    return PlainTokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)), next(iter(names.values())))


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in vocab.items()}
    else:  # a unigram model's pieces and their scores
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if "merges" in model:
        model["merges"] = [
            pair for pair in map(_pair, model["merges"]) if names.keys().isdisjoint((*pair, "".join(pair)))
        ]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])


def _pair(merge: Any) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else list(merge)
