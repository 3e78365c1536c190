"""Measures of the demo model: loss and divergence on held-out text, and how much a continuation repeats or quotes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2ForCausalLM

WINDOW = 512


def windows(ids: Sequence[int], length: int = WINDOW) -> list[Tensor]:
    """Return the ids in pieces, int64 [1, <= length + 1], of which each begins with the last id of the one before.

    So every id but the first is predicted exactly once.
    """
    return [torch.tensor([ids[at : at + length + 1]]) for at in range(0, len(ids) - 1, length)]


@torch.no_grad()
def log_probabilities(model: Qwen2ForCausalLM, window: Tensor) -> Tensor:
    """Return log-probabilities of the next token, fp32 [T, V], for the ids int64 [1, T+1]."""
    return F.log_softmax(model(window[:, :-1], use_cache=False).logits[0].float(), dim=-1)


def held_out_loss(model: Qwen2ForCausalLM, ids: Sequence[int]) -> float:
    """Return the mean negative log-likelihood of the ids, in nats per token."""
    pieces = windows(ids)
    total = sum(F.nll_loss(log_probabilities(model, piece), piece[0, 1:], reduction="sum").item() for piece in pieces)
    return total / (len(ids) - 1)


def divergence(reference: Qwen2ForCausalLM, other: Qwen2ForCausalLM, ids: Sequence[int]) -> float:
    """Return the mean KL(reference || other) of the next-token distributions, in nats per token."""
    total = 0.0
    for piece in windows(ids):
        p, q = log_probabilities(reference, piece), log_probabilities(other, piece)
        total += F.kl_div(q, p, log_target=True, reduction="sum").item()
    return total / (len(ids) - 1)


def ngrams(items: Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    """Return all runs of n neighbouring items, in order."""
    return [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]


def repeats(items: Sequence[Hashable], n: int = 8) -> int:
    """Return how many n-grams of ``items`` are repetitions of an earlier one."""
    grams = ngrams(items, n)
    return len(grams) - len(set(grams))


def quoted_share(items: Sequence[Hashable], source_ngrams: set[tuple[Hashable, ...]], n: int = 4) -> float:
    """Return the share of the n-grams of ``items`` that are among ``known``."""
    grams = ngrams(items, n)
    return sum(gram in source_ngrams for gram in grams) / max(1, len(grams))


@torch.no_grad()
def greedy(model: Qwen2ForCausalLM, prompt: Sequence[int], max_new: int, stops: Sequence[int]) -> list[int]:
    """Return the most likely continuation, at most ``max_new`` ids; a stop id ends it and is its last element."""
    made: list[int] = []
    cache, fed = None, torch.tensor([list(prompt)])
    while len(made) < max_new and not (made and made[-1] in stops):
        output = model(fed, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        made.append(int(output.logits[0, -1].argmax()))
        fed = torch.tensor([made[-1:]])
    return made
