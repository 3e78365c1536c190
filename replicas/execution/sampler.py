"""Sampler: chooses tokens from logits. Stateless: everything that a choice depends on is in its SampleSpec.

Order: bias and penalties, suppressed ids, what a grammar forbids, temperature, min_p, top_k, top_p, then one draw
by inverse distribution function over token ids. Log-probabilities are those of the model itself, before all of that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..sampling_params import SamplingParams, TokenIds
from ..types import TokenLogprob
from .philox import uniform
from .step_plan import ItemResult, SampleSpec

_COLDEST = 1e-6  # below this temperature every draw is the most likely token already
_SMALLEST = 1e-300  # less than the most likely token's probability, so that a nucleus always has that token
_TOP_P_CANDIDATES = 1024  # a nucleus seldom has more tokens


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[ItemResult]:
    """Return one token for each row of logits fp32 [R, vocabulary]. A row's result depends on that row alone.

    A row whose grammar's mask is not ready gets no token.
    """
    if not specs:
        return []
    finite = torch.isfinite(logits.amax(dim=-1)).tolist()  # NaN wins a maximum, so this finds it too
    return [
        _sample_row(logits[row], spec) if finite[row] else ItemResult(fault="logits are not finite")
        for row, spec in enumerate(specs)
    ]


def _sample_row(logits: torch.Tensor, spec: SampleSpec) -> ItemResult:
    params = spec.params
    if spec.matcher is not None and not spec.matcher.mask:
        return ItemResult()
    adjusted = adjust_logits(logits, spec)
    if spec.matcher is not None:
        adjusted = _constrain(adjusted, spec.matcher.mask)
        can_be_none = spec.suppressed or params.logit_bias
        if can_be_none and adjusted.amax() == -torch.inf:  # the grammar's tokens are all ruled out, so it wins
            adjusted = _constrain(logits, spec.matcher.mask)
    if isinstance(params.allowed_token_ids, TokenIds) and params.allowed_token_ids:
        adjusted = _allow_only(adjusted, logits, params.allowed_token_ids)
    if params.greedy:
        token = _argmax(adjusted)
    else:
        token = _draw(adjusted, params, uniform(spec.seed, spec.choice, spec.position))
    return ItemResult(token=token_logprob(logits, token, params.logprobs))


def _argmax(logits: torch.Tensor) -> int:
    """Return the index of the first of the largest logits. On a CPU torch's own argmax takes ten times as long as these
    two passes.
    """
    if logits.device.type != "cpu":
        return int(logits.argmax())
    return int((logits == logits.amax()).numpy().argmax())


def token_logprob(logits: torch.Tensor, token: int, top: int | None) -> TokenLogprob:
    """Return the log-probability of `token` under logits fp32 [vocabulary]; 0.0, without computing it, if `top` is
    None.
    """
    if top is None:
        return TokenLogprob(token, 0.0)
    logprobs = torch.log_softmax(logits, dim=-1)
    values, ids = logprobs.topk(top) if top else (logprobs[:0], logprobs[:0].long())
    return TokenLogprob(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def adjust_logits(logits: torch.Tensor, spec: SampleSpec) -> torch.Tensor:
    """Return a copy with bias, penalties and suppressed ids applied; the same tensor if there are none."""
    params = spec.params
    if not (params.penalised or params.logit_bias or spec.suppressed):
        return logits
    logits = logits.clone()
    if params.penalised:
        _penalise(logits, spec)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.biases.values()), device=logits.device)
    if spec.suppressed:
        logits[list(spec.suppressed)] = -torch.inf
    return logits


def _constrain(logits: torch.Tensor, mask: bytes) -> torch.Tensor:
    """Return a copy with forbidden tokens at minus infinity. `mask`: a bit for each token that may follow."""
    bits = np.unpackbits(~np.frombuffer(mask, dtype=np.uint8), count=logits.numel(), bitorder="little")
    return logits.masked_fill(torch.from_numpy(bits).view(torch.bool).to(logits.device), -torch.inf)


def _allow_only(adjusted: torch.Tensor, logits: torch.Tensor, allowed: TokenIds) -> torch.Tensor:
    """Return `adjusted` with all tokens but the allowed ones at minus infinity. If all of those are suppressed,
    `logits` is used in its place.
    """
    others = torch.frombuffer(allowed.others, dtype=torch.bool).to(logits.device)
    selected = torch.full_like(adjusted, -torch.inf)
    selected[: len(others)] = adjusted[: len(others)].masked_fill(others, -torch.inf)
    if selected.amax() == -torch.inf:
        selected[: len(others)] = logits[: len(others)].masked_fill(others, -torch.inf)
    return selected


def _penalise(logits: torch.Tensor, spec: SampleSpec) -> None:
    params = spec.params
    output = torch.tensor(list(spec.output_ids), dtype=torch.int64, device=logits.device)
    if params.repetition_penalty != 1:
        prompt = torch.tensor(list(spec.prompt_ids), dtype=torch.int64, device=logits.device)
        seen = torch.unique(torch.cat([prompt, output]))
        values = logits[seen]
        penalty = params.repetition_penalty
        # A tiny penalty must not make infinity: two of them would be infinity minus infinity in the draw.
        scaled = torch.where(values > 0, values / penalty, values * penalty)
        logits[seen] = scaled.clamp(max=torch.finfo(scaled.dtype).max / 2)
    ids, counts = torch.unique(output, return_counts=True)
    logits[ids] -= params.presence_penalty + params.frequency_penalty * counts.to(logits.dtype)


def _draw(logits: torch.Tensor, params: SamplingParams, u: float) -> int:
    # Shifted first: dividing by a tiny temperature must not make infinity minus infinity.
    probs = torch.softmax((logits - logits.amax()) / max(params.temperature, _COLDEST), dim=-1)
    ids = None  # candidates in ascending order; None: every id
    if params.min_p > 0:
        probs, ids = _select(probs, ids, (probs >= params.min_p * probs.amax()).nonzero().squeeze(1))
    if 0 < params.top_k < probs.numel():
        probs, ids = _select(probs, ids, probs.topk(params.top_k).indices.sort().values)
    if params.top_p < 1:
        probs, ids = _select(probs, ids, _nucleus(probs, params.top_p))
    # Token-id order and float64: the draw moves little when the logits do.
    cumulative = probs.double().cumsum(0)
    index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    if index >= probs.numel() or probs[index] == 0:  # u landed on the rounding edge of the last possible token
        index = int(probs.nonzero()[-1])
    return index if ids is None else int(ids[index])


def _select(probs: torch.Tensor, ids: torch.Tensor | None, selected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return probs[selected], selected if ids is None else ids[selected]


def _nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the positions, ascending, of the most likely tokens up to the one that reaches top_p of the remaining
    probability.
    """
    target = max(top_p * float(probs.double().sum()), _SMALLEST)  # with a tiny top_p the product is 0
    values, at = probs.topk(min(_TOP_P_CANDIDATES, probs.numel()))
    reached = values.double().cumsum(0)
    if reached[-1] < target and len(values) < probs.numel():
        return _wide_nucleus(probs, target)
    return at[reached - values.double() < target].sort().values


def _wide_nucleus(probs: torch.Tensor, target: float) -> torch.Tensor:
    """Return the kept positions as `_nucleus` does, by buckets: only the bucket in which the target is reached is
    sorted.
    """
    bucket = probs.view(torch.int32) >> 16  # floats that are not negative are ordered like their bits
    mass = torch.bincount(bucket, weights=probs.double())
    from_top = mass.flip(0).cumsum(0)
    edge = len(mass) - 1 - int(torch.searchsorted(from_top, target).clamp(max=len(mass) - 1))
    selected = bucket > edge
    inside = (bucket == edge).nonzero().squeeze(1)
    values, order = probs[inside].double().sort(descending=True, stable=True)
    above = from_top[len(mass) - 1 - edge] - mass[edge]
    selected[inside[order[above + values.cumsum(0) - values < target]]] = True
    return selected.nonzero().squeeze(1)
