"""What a prediction is made of, and what it says: the request, a replica's speed, the objectives."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...replicas.protocol import BATCHES

__all__ = ["PIECES", "Ask", "Floats", "Predicted", "Slo", "Speed", "pieces"]

Floats = NDArray[np.float64]

PIECES = len(BATCHES)  # that a step's time is linear in: between two of BATCHES, and beyond the last


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives in seconds: to the first token, and per token after it."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Speed:
    """What a profile says of a replica.

    decode_s   of one step at each of BATCHES, with short contexts
    context_s  more, for each token of context of the sequences of a step
    chunk      tokens of a step, prompts' and others together
    """

    prefill_tokens_per_s: float
    decode_s: tuple[float, ...]
    context_s: float
    chunk: int
    max_running: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be placed.

    cached         by replica, tokens of the prompt that it holds already; none: nothing is known
    stored         likewise by prefix store, leading tokens that can be fetched from there
    context        tokens that the longest of its sequences may come to: where the model's context is shorter, never
    last           replicas that come after all others: it has failed there, or they are suspects
    numerics       as `Directory.add` was told: replicas of another class come after; None: any
    others         replicas of other weights than it was begun with: they come after those, and after other classes
    output_tokens  how many it may make; None: nobody knows
    """

    prompt_tokens: int
    cached: dict[int, int] | None = None
    stored: dict[int, int] | None = None
    context: int = 0
    last: Collection[int] = ()
    numerics: int | None = None
    others: Collection[int] = ()
    output_tokens: int | None = None


class Predicted(NamedTuple):
    """Of one request on one replica, in seconds. strain: of its objectives' margins, what the scarcer one takes.

    With no objectives the strain is the time to the end of an answer of usual length.

    ttft_off, tpot_off  the corrections that are in it
    """

    replica: int
    ttft_s: float
    tpot_s: float
    strain: float
    ttft_off: float = 1.0
    tpot_off: float = 1.0


def pieces(speed: Speed, full_s: float) -> Floats:
    """[2, pieces] of a step's time: between two of BATCHES as measured, and beyond them as prompts are computed.

    A step with so many tokens takes what its piece begins with, and so many times what that rises by.
    """
    ends, seconds = np.asarray(BATCHES, dtype=float), np.asarray(speed.decode_s)
    rises = np.empty(PIECES)
    rises[:-1] = np.diff(seconds) / np.diff(ends)
    rises[-1] = max(0.0, full_s - speed.decode_s[-1]) / max(1, speed.chunk - BATCHES[-1])
    return np.stack([seconds - rises * ends, rises])
