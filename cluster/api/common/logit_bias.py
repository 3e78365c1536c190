"""Reader of `logit_bias` as a list of pairs, which llama.cpp has beside OpenAI's object: a token id or a text, and
its bias.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ....replicas.errors import InvalidRequest
from ....replicas.sampling_params import MAX_BAD_WORD_CHARS, MAX_LOGIT_BIAS
from ....replicas.short_repr import short_repr

MAX_TEXT_CHARS = MAX_BAD_WORD_CHARS  # of one text


async def bias_by_token(
    pairs: Sequence[Any], tokenize: Callable[[str], Awaitable[Sequence[int]]]
) -> dict[int, float | bool]:
    """Return the bias of each token; a text's bias goes to each of its tokens. Biases of the same token are added up.

    False stays False: such a token is never chosen. Raises InvalidRequest naming `logit_bias`; SamplingParams checks
    the ranges of ids and numbers.
    """
    if len(pairs) > MAX_LOGIT_BIAS:
        raise _invalid_bias(pairs, f"at most {MAX_LOGIT_BIAS} pairs")
    found: dict[int, float | bool] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise _invalid_bias(pair, "pairs of a token id or a text, and a bias or false")
        key, bias = pair
        if isinstance(key, bool) or not isinstance(key, int | str):
            raise _invalid_bias(key, "a token id or a text")
        if bias is not False and (isinstance(bias, bool) or not isinstance(bias, int | float)):
            raise _invalid_bias(bias, "a number, or false")
        for token_id in [key] if isinstance(key, int) else await _ids(key, tokenize):
            before = found.get(token_id, 0)
            found[token_id] = False if bias is False or before is False else before + bias
    return found


async def _ids(text: str, tokenize: Callable[[str], Awaitable[Sequence[int]]]) -> Sequence[int]:
    if not 1 <= len(text) <= MAX_TEXT_CHARS:
        raise _invalid_bias(text, f"texts of 1 to {MAX_TEXT_CHARS} characters")
    return await tokenize(text)


def _invalid_bias(value: Any, accepted: str) -> InvalidRequest:
    message = f"logit_bias: {short_repr(value)} is not accepted; expected {accepted}"
    return InvalidRequest(message, param="logit_bias", code="invalid_value")
