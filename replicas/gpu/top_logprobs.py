"""Log-probabilities besides those of sampled tokens: of the likeliest tokens, and of a prompt's tokens."""

from __future__ import annotations

import torch

from ..sampling_params import MAX_LOGPROBS
from ..types import TokenLogprob
from .accelerator import Accelerator
from .packed_transfer import PackedTransfer, TransferSlot

PROMPT_ROWS = 32  # rows of a prompt that are normalised at a time: each takes twice the memory of its logits


class TopLogprobs:
    """Likeliest tokens of at most `rows` rows, in memory of the device that all steps share; copied to the host if a
    request asks for them.
    """

    def __init__(self, accelerator: Accelerator, rows: int, vocab_size: int) -> None:
        self._each = min(MAX_LOGPROBS, vocab_size)
        self._packed = PackedTransfer(accelerator, rows * self._each, {"id": torch.int32, "logprob": torch.float32})

    def put(self, logits: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Find the likeliest tokens in the model's own logits fp32 [R, V], where the sampled `tokens` int64 [R] have
        `logprobs` fp32 [R], as work of the device.

        Log-probabilities are derived from the distance to the sampled token's logit. So the vocabulary is not summed
        again, and the sampled token has the same log-probability among the alternatives.
        """
        values, ids = logits.topk(self._each)
        chosen = logits.gather(1, tokens[:, None])
        count = ids.numel()
        self._packed.there["id"][:count].copy_(ids.view(-1))
        # Rounding must not make anything likelier than certain.
        self._packed.there["logprob"][:count].copy_((values - chosen + logprobs[:, None]).clamp(max=0).view(-1))

    def fetch(self) -> HostLogprobs:
        """Submit the copy of the likeliest tokens to the host; it is there after the next mark."""
        turn = self._packed.turn()
        self._packed.fetch(turn)
        return HostLogprobs(turn, self._each)


class HostLogprobs:
    """Likeliest tokens of a step, with their log-probabilities, on the host."""

    def __init__(self, turn: TransferSlot, each: int) -> None:
        self._ids, self._logprobs, self._each = turn.here["id"], turn.here["logprob"], each

    def beside(self, token: TokenLogprob, row: int, top: int) -> TokenLogprob:
        """Return a row's sampled token with its `top` likeliest alternatives."""
        first = row * self._each
        end = first + min(top, self._each)
        pairs = zip(self._ids[first:end].tolist(), self._logprobs[first:end].tolist(), strict=True)
        return token._replace(top=tuple(pairs))


def target_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids int32 and log-probabilities fp32, [N, 1 + top], of each target token and then of the likeliest, best
    first, as work of the device.

    logits         fp32 [R, V]
    rows, targets  int64 [N]: the row of each target's logits, and its token
    """
    parts = []
    for some, wanted in zip(torch.split(rows, PROMPT_ROWS), torch.split(targets, PROMPT_ROWS), strict=True):
        logprobs = torch.log_softmax(logits[some], dim=-1)
        values, ids = logprobs.topk(min(top, logprobs.shape[1]))
        wanted = wanted[:, None]
        parts.append((torch.cat((wanted, ids), 1).int(), torch.cat((logprobs.gather(1, wanted), values), 1)))
        del logprobs, values  # frees them before the next ones are computed
    return torch.cat([ids for ids, _ in parts]), torch.cat([values for _, values in parts])
