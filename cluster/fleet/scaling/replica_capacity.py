"""Capacity of one replica: how much of a load it serves within the objectives.

Arithmetic on its profile, no simulation.

A replica that serves `running` sequences spends a share `full` of its time in steps that are filled up with a piece of
a prompt, and the rest in steps of decodes alone, as cluster/routing/prediction/latency_model.py has it:

    full_s   = chunk / prefill rate + context_s * contexts       a step with a piece of a prompt
    rate     = (chunk - running) / full_s                        prompt tokens/s while steps are full
    alone_s  = decode_s(running) + context_s * contexts          a step of decodes alone
    1 / TPOT = full / max(full_s, alone_s) + (1 - full) / alone_s

TPOT is met while `full` stays low enough. TTFT is met while a prompt seldom waits too long for those before it: by
Kingman's approximation of a queue with random arrivals and service times that vary as much,

    P(wait > t) = full * exp(-(1 - full) * t / s)                s: the time of a mean prompt

which must stay below MAX_MISS_SHARE for the time that the prompt itself leaves of the objective. Cached tokens are not
computed, but are part of the context all the same.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from ....replicas.types import PROFILED_BATCH_SIZES
from ...routing.prediction.latency_model import ReplicaSpeed, Slo

MAX_MISS_SHARE = 0.05  # share of requests whose first token may be late on a replica at full load
MARGIN = 0.85  # share of the objective that the mean time per token may reach, since requests differ
_MIN_POSITIVE = 1e-9  # requests/s or tokens/s that stand for none in a division
_HALVINGS = 24

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """Arrivals per second.

    cached_tokens  prompt tokens that need not be computed
    """

    requests: float
    prompt_tokens: float
    output_tokens: float
    cached_tokens: float = 0.0

    @property
    def prompt(self) -> float:
        """Tokens of a mean prompt."""
        return self.prompt_tokens / max(self.requests, _MIN_POSITIVE)

    @property
    def computed(self) -> float:
        """Tokens of a mean prompt that are not cached; at least one."""
        return max(1.0, (self.prompt_tokens - self.cached_tokens) / max(self.requests, _MIN_POSITIVE))

    @property
    def output(self) -> float:
        return self.output_tokens / max(self.requests, _MIN_POSITIVE)

    def times(self, factor: float) -> OfferedLoad:
        return OfferedLoad(*(factor * each for each in astuple(self)))


def carried_share(speed: ReplicaSpeed, slo: Slo, load: OfferedLoad) -> float:
    """Return the share of the load that a replica serves within the objectives; above 1 for more than all of it.

    0: it cannot meet the objectives for such requests.
    """
    max_running = int(min(speed.max_running, speed.kv_tokens // max(load.prompt + load.output, 1.0)))
    if max_running < 1 or load.requests <= 0:
        return 0.0
    running = np.arange(1.0, max_running + 1)
    contexts_s = speed.context_s * (load.prompt + load.output / 2) * running
    alone_s = np.interp(running, PROFILED_BATCH_SIZES, speed.decode_s) + contexts_s
    full_s = speed.chunk / speed.prefill_tokens_per_s + contexts_s
    rate = np.maximum(speed.chunk - running, 0.0) / full_s
    slow_s = np.maximum(full_s, alone_s)
    max_full = np.minimum(
        _full_share_by_tpot(alone_s, slow_s, slo.tpot_s * MARGIN), _full_share_by_ttft(load.computed, rate, slo.ttft_s)
    )
    # More time for prompts leaves less for decodes: the best split is where both serve the same share of the load.
    gone = 1 / alone_s - 1 / slow_s
    per_prompt, per_output = load.computed * max(load.requests, _MIN_POSITIVE), max(load.output_tokens, _MIN_POSITIVE)
    level = running / alone_s / per_output / np.maximum(rate / per_prompt + running * gone / per_output, _MIN_POSITIVE)
    full = np.minimum(level, max_full)
    share = np.minimum(full * rate / per_prompt, running * (1 / alone_s - full * gone) / per_output)
    return float(np.max(np.where(max_full > 0, share, 0.0)))


def _full_share_by_tpot(alone_s: Floats, slow_s: Floats, tpot_s: float) -> Floats:
    """Return the largest share of full steps that meets TPOT; 0 where even decodes alone are too slow."""
    gone = 1 / alone_s - 1 / slow_s
    slack_s = 1 / alone_s - 1 / tpot_s
    some = np.divide(slack_s, gone, out=np.ones_like(gone), where=gone > 0)
    max_share: Floats = np.where(alone_s > tpot_s, 0.0, np.where(slow_s <= tpot_s, 1.0, np.clip(some, 0.0, 1.0)))
    return max_share


def _full_share_by_ttft(prompt: float, rate: Floats, ttft_s: float) -> Floats:
    """Return the largest share of full steps that meets TTFT; 0 where a mean prompt alone takes longer."""
    service_s = prompt / np.maximum(rate, _MIN_POSITIVE)
    turns = np.maximum(ttft_s - service_s, 0.0) / np.maximum(service_s, _MIN_POSITIVE)
    low, high = np.zeros_like(rate), np.ones_like(rate)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        holds = middle * np.exp(-(1 - middle) * turns) <= MAX_MISS_SHARE
        low, high = np.where(holds, middle, low), np.where(holds, high, middle)
    return np.where(turns > 0, low, 0.0)
