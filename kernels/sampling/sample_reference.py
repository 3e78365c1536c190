"""Reference of sample.py in plain torch and integers, with a sort; the kernels must give exactly its results."""

from __future__ import annotations

import math

import torch

from .sample import PenaltyRows, SamplingRows

_POLYNOMIAL = (2737501, 20571132, 119165493, 515877902, 1488521986, 2**31)
_MASK = 0xFFFFFFFF


def weights_of(keys: torch.Tensor) -> torch.Tensor:
    """Return int64 weights of int64 keys, the same as integer_arithmetic.weight_of."""
    power = keys * 3098164009
    fraction, value = (power >> 24) & _MASK, torch.full_like(keys, 234126)
    for coefficient in _POLYNOMIAL:
        value = coefficient - ((fraction * value) >> 32)
    return (value << 13) >> (power >> 56)


def uniform_bits(seed: int, choice: int, position: int) -> int:
    """Return 53 random bits by Philox4x32-10 (Salmon et al., SC 2011)."""
    counter = [position & _MASK, (position >> 32) & _MASK, choice & _MASK, 0]
    keys = [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ keys[0], second & _MASK, (first >> 32) ^ counter[3] ^ keys[1], first & _MASK,
        ]  # fmt: skip
        keys = [(keys[0] + 0x9E3779B9) & _MASK, (keys[1] + 0xBB67AE85) & _MASK]
    return ((counter[0] >> 5) << 26) + (counter[1] >> 6)


def choose_token(
    logits: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    choice: int,
    position: int,
) -> int:
    """Return the sampled id for logits fp32 [V] without NaN; the parameters must be exact in fp32."""
    top = logits.amax()
    if not math.isfinite(top):
        return 0
    if not temperature > 0:
        return int((logits == top).nonzero()[0])
    heat = torch.tensor(max(temperature, torch.tensor(1e-6).item()))
    keys = (((top - logits) / heat).clamp(max=31.5) * 2**25).long()
    weights = weights_of(keys)
    weights[weights < math.ceil(min_p * 2**44)] = 0
    order = keys.sort(stable=True).indices  # among equal keys the lowest ids come first
    kept = order[weights[order] > 0]
    if top_k > 0:
        kept = kept[:top_k]
    if top_p < 1:
        sums = weights[kept].cumsum(0)
        wanted = -(-math.ceil(top_p * 2**40) * int(sums[-1]) // 2**40)
        kept = kept[sums - weights[kept] < max(wanted, 1)]
    kept = kept.sort().values
    sums = weights[kept].cumsum(0)
    target = uniform_bits(seed, choice, position) * int(sums[-1]) >> 53
    return int(kept[int((sums <= target).sum())])


def choose_tokens(logits: torch.Tensor, rows: SamplingRows) -> list[int]:
    """Return the result of `choose_token` for every row of logits [R, V]; 0 for a row with a NaN."""
    of_rows = zip(*(getattr(rows, name).tolist() for name in rows.__slots__), strict=True)
    return [
        0 if row.isnan().any() else choose_token(row, *parameters)
        for row, parameters in zip(logits.cpu(), of_rows, strict=True)
    ]


def penalize(logits: torch.Tensor, history: torch.Tensor, rows: PenaltyRows) -> torch.Tensor:
    """Return logits with penalties applied as by `sample.penalize_logits`, each operation rounded by itself."""
    stored = history.index_select(0, rows.place)
    counts = stored & torch.iinfo(history.dtype).max
    repetition = rows.repetition[:, None]
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition).clamp(
        max=torch.finfo(torch.float32).max / 2
    )
    found = torch.where((stored != 0) & (repetition != 1), scaled, logits)
    taken = rows.frequency[:, None] * counts.float() + rows.presence[:, None]
    return torch.where(counts > 0, found - taken, found)


def logprob(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities fp64 [R] of tokens; NaN for a row whose largest logit is not finite."""
    wide = logits.double()
    found = torch.log_softmax(wide, -1).gather(1, tokens[:, None]).squeeze(1)
    return torch.where(wide.amax(-1).isfinite(), found, torch.nan)
