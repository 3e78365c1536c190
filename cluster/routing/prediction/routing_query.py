"""Types of a prediction: the request to place, a replica's speed, the objectives, and the result."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....replicas.host.metric_fields import gauge
from ....replicas.types import PROFILED_BATCH_SIZES

__all__ = ["PIECES", "FloatArray", "LatencyPrediction", "ReplicaSpeed", "RoutingQuery", "Slo", "step_time_pieces"]

FloatArray = NDArray[np.float64]

PIECES = len(
    PROFILED_BATCH_SIZES
)  # intervals in which a step's time is linear: between two of PROFILED_BATCH_SIZES, and beyond the last


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency objectives in seconds: time to first token, and time per token after it."""

    ttft_s: float = field(
        metadata=gauge(
            "objective_time_to_first_token_seconds", "The fleet file's objective for the first token", is_mean=True
        )
    )
    tpot_s: float = field(
        metadata=gauge(
            "objective_time_per_output_token_seconds", "The fleet file's objective for each later token", is_mean=True
        )
    )


@dataclass(frozen=True, slots=True)
class ReplicaSpeed:
    """Speed and limits of a replica, as its profile states them.

    decode_s    seconds of one step at each batch size of PROFILED_BATCH_SIZES, with short contexts
    context_s   seconds that each token of the contexts of a step's sequences adds
    chunk       maximum tokens of a step, prompts and decodes together
    kv_tokens   tokens that its KV blocks hold
    """

    prefill_tokens_per_s: float
    decode_s: tuple[float, ...]
    context_s: float
    chunk: int
    max_running: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class RoutingQuery:
    """Routing query: what is to be placed on a replica.

    cached         prompt tokens that each replica has cached, by replica; None: nothing is known
    stored         leading prompt tokens that each prefix store has, by store; None: nothing is known
    context        context that the longest of its sequences may need: a replica with a shorter one is never chosen
    last           replicas that rank behind all others: the request has failed there, or they are suspects
    numerics       numerics class, as passed to `LatencyModel.add`: replicas of another class rank behind; None: any
    others         replicas with other weights than the answer began with: they rank behind those, and behind other
                   classes
    output_tokens  maximum output tokens; None: unknown
    sequences      number of answers that are placed together
    beginning      returns a digest of the first tokens of the longest prompt, which is the same in all ingresses; empty
                   bytes: the prompt is too short
    """

    prompt_tokens: int
    cached: dict[int, int] | None = None
    stored: dict[int, int] | None = None
    context: int = 0
    last: Collection[int] = ()
    numerics: int | None = None
    others: Collection[int] = ()
    output_tokens: int | None = None
    sequences: int = 1
    beginning: Callable[[], bytes] = bytes


class LatencyPrediction(NamedTuple):
    """Predicted times in seconds of one request on one replica.

    strain              share of its objective that the scarcer of both times takes, after the margins; without
                        objectives the seconds until an answer of usual length ends
    ttft_off, tpot_off  the corrections that are part of the prediction
    computed            prompt tokens that the replica would compute
    queue_s, fetch_s    parts of `ttft_s` before its correction: until the replica begins the prompt, and how much later
                        it does for what it fetches from its prefix store
    """

    replica: int
    ttft_s: float
    tpot_s: float
    strain: float
    ttft_off: float = 1.0
    tpot_off: float = 1.0
    computed: float = 0.0
    queue_s: float = 0.0
    fetch_s: float = 0.0


def step_time_pieces(speed: ReplicaSpeed, full_s: float) -> FloatArray:
    """Return offset and slope of a step's time in each piece, as an array [2, pieces].

    A step with n tokens takes the offset plus n times the slope. Between two of PROFILED_BATCH_SIZES these follow the
    measurements, and above the last the speed of prefill.
    """
    ends, seconds = np.asarray(PROFILED_BATCH_SIZES, dtype=float), np.asarray(speed.decode_s)
    rises = np.empty(PIECES)
    rises[:-1] = np.diff(seconds) / np.diff(ends)
    rises[-1] = max(0.0, full_s - speed.decode_s[-1]) / max(1, speed.chunk - PROFILED_BATCH_SIZES[-1])
    return np.stack([seconds - rises * ends, rises])
