"""Loss and divergence on the held-out text, and how much a continuation repeats or quotes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2ForCausalLM

WINDOW = 512


def windows(ids: Sequence[int], length: int = WINDOW) -> list[Tensor]:
    """int64 [1, <= length + 1] pieces that share one token, so that all but the first are predicted once."""
    return [torch.tensor([ids[at : at + length + 1]]) for at in range(0, len(ids) - 1, length)]


@torch.no_grad()
def log_probabilities(model: Qwen2ForCausalLM, window: Tensor) -> Tensor:
    """fp32 [T, V] next-token log probabilities for int64 [1, T+1]."""
    return F.log_softmax(model(window[:, :-1], use_cache=False).logits[0].float(), dim=-1)


def held_out_loss(model: Qwen2ForCausalLM, ids: Sequence[int]) -> float:
    """Mean negative log likelihood, nats per token."""
    pieces = windows(ids)
    total = sum(F.nll_loss(log_probabilities(model, piece), piece[0, 1:], reduction="sum").item() for piece in pieces)
    return total / (len(ids) - 1)


def divergence(reference: Qwen2ForCausalLM, other: Qwen2ForCausalLM, ids: Sequence[int]) -> float:
    """Mean KL(reference || other) of the next-token distributions, nats per token."""
    total = 0.0
    for piece in windows(ids):
        p, q = log_probabilities(reference, piece), log_probabilities(other, piece)
        total += F.kl_div(q, p, log_target=True, reduction="sum").item()
    return total / (len(ids) - 1)


def ngrams(items: Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    """All runs of n neighbours, in order."""
    return [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]


def repeats(items: Sequence[Hashable], n: int = 8) -> int:
    """How many n-grams occur again."""
    grams = ngrams(items, n)
    return len(grams) - len(set(grams))


def quoted_share(items: Sequence[Hashable], known: set[tuple[Hashable, ...]], n: int = 4) -> float:
    """The share of the n-grams of ``items`` that are among ``known``."""
    grams = ngrams(items, n)
    return sum(gram in known for gram in grams) / max(1, len(grams))


@torch.no_grad()
def greedy(model: Qwen2ForCausalLM, prompt: Sequence[int], max_new: int, stops: Sequence[int]) -> list[int]:
    """The most likely continuation, at most ``max_new`` ids; a stop id ends it and is its last element."""
    made: list[int] = []
    cache, fed = None, torch.tensor([list(prompt)])
    while len(made) < max_new and not (made and made[-1] in stops):
        output = model(fed, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        made.append(int(output.logits[0, -1].argmax()))
        fed = torch.tensor([made[-1:]])
    return made
