"""Text that a model was not trained on, and how far two distributions of its next tokens are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from motley.replicas.engine.startup.engine_builder import BuiltEngine
from motley.replicas.host.measurement_rows import row

WINDOW = 512  # tokens of the text that are computed at once


def token_windows(built: BuiltEngine, text: str, tokens: int) -> list[tuple[int, ...]]:
    """Return the first `tokens` + 1 tokens of a text in pieces; each begins with the last token of the one before.

    So every token but the first is predicted exactly once. Raises ValueError where there is nothing to predict.
    """
    if built.tokenizer is None:
        raise ValueError("text: the model has no tokenizer")
    ids = built.tokenizer.encode(text)[: tokens + 1]
    if len(ids) < 2:
        raise ValueError("text: there is nothing to predict in it, since it has fewer than two tokens")
    return list(_pieces(ids, window_length(built)))


def window_length(built: BuiltEngine) -> int:
    """Return the number of tokens of a text that are computed at once: 512, or what the context has room for."""
    return min(WINDOW, built.core.limits.max_model_len - 1)


def _pieces(ids: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    for at in range(0, len(ids) - 1, length):
        yield tuple(ids[at : at + length + 1])


def next_token_logprobs(built: BuiltEngine, piece: Sequence[int]) -> torch.Tensor:
    """Return the log-probabilities of the next token after each of a piece but its last, fp64 [T - 1, vocabulary]."""
    return F.log_softmax(built.logits(tuple(piece[:-1])).double(), dim=-1)


@dataclass
class QualityDifference:
    """Sums over the tokens of a text that two sides have predicted.

    divergence  KL(reference || other) of the next token's distribution, in nats
    same        tokens of which both have the same most likely next one
    losses      negative log-likelihoods of the text, in nats: the reference's and the other's
    """

    count: int = 0
    divergence: float = 0.0
    same: int = 0
    losses: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, piece: Sequence[int], reference: torch.Tensor, other: torch.Tensor) -> None:
        """Add the log-probabilities [T - 1, vocabulary] that both sides give the tokens of a piece."""
        wanted = torch.tensor(piece[1:])
        self.count += len(wanted)
        self.divergence += F.kl_div(other, reference, log_target=True, reduction="sum").item()
        self.same += int((reference.argmax(-1) == other.argmax(-1)).sum())
        for which, found in enumerate((reference, other)):
            self.losses[which] += F.nll_loss(found, wanted, reduction="sum").item()

    def rows(self, workload: dict[str, Any], divergence: str, reference: str) -> list[dict[str, Any]]:
        """Return a report's rows: the divergence under that name, the share of equal tokens, and both perplexities."""
        perplexities = [math.exp(loss / self.count) for loss in self.losses]
        return [
            row(divergence, workload, "nats per token", [self.divergence / self.count]),
            row("same most likely token", workload, "of the tokens", [self.same / self.count]),
            row("perplexity", workload, "", [perplexities[1]], peer=reference, peer_samples=[perplexities[0]],
                higher_is_better=False),
        ]  # fmt: skip
