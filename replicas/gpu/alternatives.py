"""Log-probabilities that are told beside those of the tokens chosen: of the likeliest ids, and of a prompt's tokens."""

from __future__ import annotations

import torch

from ..protocol import TokenLogprob
from ..sampling_params import MAX_LOGPROBS
from .accelerator import Accelerator
from .packed import Packed, Turn

__all__ = ["PROMPT_ROWS", "Alternatives", "Told", "of_targets"]

PROMPT_ROWS = 32  # of a prompt that are normalised at a time: each takes as much memory as its logits, twice


class Alternatives:
    """The likeliest ids of `rows` rows at most, in memory of the device that steps share: copied back if any asks."""

    def __init__(self, accelerator: Accelerator, rows: int, vocab_size: int) -> None:
        self._each = min(MAX_LOGPROBS, vocab_size)
        self._packed = Packed(accelerator, rows * self._each, {"id": torch.int32, "logprob": torch.float32})

    def put(self, logits: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Work: of the model's own logits fp32 [R, V], where `tokens` int64 [R] have `logprobs` fp32 [R].

        By their distance from the token that was chosen: so the vocabulary is not summed once more, and the chosen
        one has the same log-probability as an alternative.
        """
        values, ids = logits.topk(self._each)
        chosen = logits.gather(1, tokens[:, None])
        count = ids.numel()
        self._packed.there["id"][:count].copy_(ids.view(-1))
        # Rounding must not make anything likelier than certain.
        self._packed.there["logprob"][:count].copy_((values - chosen + logprobs[:, None]).clamp(max=0).view(-1))

    def fetch(self) -> Told:
        """There when what is submitted before the next mark is done."""
        turn = self._packed.turn()
        self._packed.fetch(turn)
        return Told(turn, self._each)


class Told:
    """What `Alternatives` bring to the host."""

    def __init__(self, turn: Turn, each: int) -> None:
        self._ids, self._logprobs, self._each = turn.here["id"], turn.here["logprob"], each

    def beside(self, token: TokenLogprob, row: int, top: int) -> TokenLogprob:
        """The token of a row with that many alternatives."""
        first = row * self._each
        end = first + min(top, self._each)
        pairs = zip(self._ids[first:end].tolist(), self._logprobs[first:end].tolist(), strict=True)
        return token._replace(top=tuple(pairs))


def of_targets(
    logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Work: ids int32 and log-probabilities fp32 [N, 1 + top] of each target and of the likeliest ids, best first.

    logits         fp32 [R, V]
    rows, targets  int64 [N]: a target's logits, and its id
    """
    parts = []
    for some, wanted in zip(torch.split(rows, PROMPT_ROWS), torch.split(targets, PROMPT_ROWS), strict=True):
        logprobs = torch.log_softmax(logits[some], dim=-1)
        values, ids = logprobs.topk(min(top, logprobs.shape[1]))
        wanted = wanted[:, None]
        parts.append((torch.cat((wanted, ids), 1).int(), torch.cat((logprobs.gather(1, wanted), values), 1)))
        del logprobs, values  # before the next are made
    return torch.cat([ids for ids, _ in parts]), torch.cat([values for _, values in parts])
