"""Which replica will finish a request soonest: what is known of each, as columns, and the choice. Pure, no Ray.

A directory holds what replicas have published (their profiles once, their load now and then) and what this ingress
itself has sent since; a prediction is arithmetic on these columns, one pass for all replicas.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...replicas.protocol import BATCHES, BLOCK_TOKENS, ReplicaLoad

__all__ = ["Ask", "Directory", "Predicted", "Slo", "Speed"]

_CORRECTED = 0.05  # how much of a correction one observation is
_GROWN = 0.01  # how much of the growth that all replicas have in common,
_MOST_GROWN = 2.0  # and the most of it
_MOST_OFF = 5.0  # corrections stay within this factor
_PACE_S = 4.0  # over which the rate of prompts' tokens is taken
_SILENT_S = 1.0  # a replica that has not been heard for longer does what it did less and less
_RANKS = 8  # replicas that are tried for one request
_NEAR = 0.05  # predictions that are so close are the same, and fall at random
_MISSES = 0.02  # share of the admitted that may miss an objective,
_LEARNED = 0.02  # and how fast the margin follows what they do
_MARGIN = 0.85  # at first
_OTHERS, _LAST = 1e6, 1e9  # strains of replicas that come after all others
_MARGINS = (0.5, 1.0)  # of the objective: predicted to take longer, a request counts as one that will miss it

Floats = NDArray[np.float64]

_KNOTS = np.asarray(BATCHES, dtype=float)
_GAPS = np.diff(_KNOTS, prepend=0.0)  # below each
_MOST_ROWS = float(BATCHES[-1])

# Columns of a directory, and what they hold of a replica that has just come.
_COLUMNS = {
    "_prefill": 1.0, "_context_s": 0.0, "_chunk": 1.0, "_full_s": 1.0, "_beyond_s": 0.0, "_max_running": 1.0,
    "_kv_tokens": 1.0, "_longest": math.inf, "_numerics": 0.0, "_of": 0.0, "_queued": 0.0, "_sequences": 0.0,
    "_kv_used": 0.0, "_mean_context": 0.0, "_computed": 0.0, "_prefill_rate": 0.0, "_carried": 0.0,
    "_sent_tokens": 0.0, "_sent": 0.0, "_ttft_off": 1.0, "_tpot_off": 1.0, "_fetch_s": 0.0,
}  # fmt: skip


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
    output_tokens  how many it may make; None: nobody knows
    """

    prompt_tokens: int
    cached: dict[int, int] | None = None
    stored: dict[int, int] | None = None
    context: int = 0
    last: Collection[int] = ()
    numerics: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Predicted:
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


class Directory:
    """Replicas by number; the number of one that has gone is given to another. Times are the caller's, in seconds."""

    # A column each: of the profiles,
    _prefill: Floats
    _context_s: Floats
    _chunk: Floats
    _full_s: Floats  # a step's that is full
    _beyond_s: Floats  # a token's beyond the largest of BATCHES
    _max_running: Floats
    _kv_tokens: Floats
    _longest: Floats
    _numerics: Floats
    # as heard,
    _of: Floats
    _queued: Floats
    _sequences: Floats
    _kv_used: Floats
    _mean_context: Floats
    _computed: Floats  # tokens of prompts since the replica began
    _prefill_rate: Floats  # of these per second, of late
    _fetch_s: Floats  # of a token, from its prefix store; 0: nothing is fetched
    # sent from here: in all, and what is not in what was heard,
    _carried: Floats
    _sent_tokens: Floats
    _sent: Floats
    # and corrections: observed over predicted.
    _ttft_off: Floats
    _tpot_off: Floats

    def __init__(self, speeds: Sequence[Speed], slo: Slo | None, rng: random.Random) -> None:
        self.slo = slo
        self._rng = rng
        self._free: list[int] = []
        self._recent: list[deque[tuple[float, float, float]]] = []
        self._decode = np.ones((0, len(BATCHES)))
        self._usable = np.zeros(0, dtype=bool)
        self._store = np.zeros(0, dtype=int)
        self._last_store = 0
        for name in _COLUMNS:
            setattr(self, name, np.zeros(0))
        self._grow(len(speeds))
        self._output_tokens, self._prompt_tokens = 150.0, 500.0  # of those of late
        self._growth = 1.0  # of the time per token while answers come, for whatever joins them meanwhile
        self._latest_tpot = np.zeros(0)  # of the latest prediction, without corrections
        self._ttft_margin = self._tpot_margin = _MARGIN
        for speed in speeds:
            self.add(speed)

    def add(self, speed: Speed, *, longest: float = math.inf, numerics: int = 0) -> int:
        """The number of a replica that has come. longest: tokens that its context holds."""
        if not self._free:
            self._grow(max(8, 2 * len(self._rows)))
        row = self._free.pop()
        for name, first in _COLUMNS.items():
            getattr(self, name)[row] = first
        self._prefill[row] = speed.prefill_tokens_per_s
        self._decode[row] = speed.decode_s
        self._context_s[row] = speed.context_s
        self._chunk[row] = speed.chunk
        self._full_s[row] = full_s = speed.chunk / speed.prefill_tokens_per_s
        self._beyond_s[row] = max(0.0, full_s - speed.decode_s[-1]) / max(1, speed.chunk - BATCHES[-1])
        self._max_running[row] = speed.max_running
        self._kv_tokens[row] = speed.kv_tokens
        self._longest[row] = longest
        self._numerics[row] = numerics
        self._recent[row].clear()
        self._usable[row] = True
        return row

    def remove(self, replica: int) -> None:
        """It has gone."""
        assert replica not in self._free
        self._usable[replica] = False
        self._free.append(replica)

    def reads(self, replica: int, store: int, fetch_s: float) -> None:
        """Prefixes come to it from that store, by its number, in so many seconds a token.

        A replica computes itself what it would have to wait longer for.
        """
        self._store[replica] = store
        self._last_store = max(self._last_store, store)
        self._fetch_s[replica] = fetch_s if fetch_s * self._prefill[replica] < 1 else 0.0

    def computes(self, replica: int, ask: Ask) -> int:
        """Tokens of what is asked that it would compute, rather than have or fetch: one at least."""
        held = (ask.cached or {}).get(replica, 0)
        if ask.stored and self._fetch_s[replica] > 0:
            held = max(held, ask.stored.get(int(self._store[replica]), 0))
        return max(1, ask.prompt_tokens - held)

    def _fetches(self, ask: Ask, stored: dict[int, int], new: Floats) -> tuple[Floats, Floats]:
        """Of the tokens that each replica does not have, what is left for it to compute; and seconds for the others."""
        depths = np.zeros(max(self._last_store, *stored) + 1)
        for store, tokens in stored.items():
            depths[store] = tokens
        left = np.minimum(new, np.maximum(ask.prompt_tokens - depths[self._store], 1.0))
        left = np.where(self._fetch_s > 0, left, new)
        return left, (new - left) * self._fetch_s

    def _grow(self, size: int) -> None:
        """Room for so many; columns of nobody have values that nothing stumbles over."""
        held = len(self._recent)
        for name, first in _COLUMNS.items():
            column = np.full(size, first)
            column[:held] = getattr(self, name)
            setattr(self, name, column)
        self._decode = np.concatenate([self._decode, np.ones((size - held, len(BATCHES)))])
        self._usable = np.concatenate([self._usable, np.zeros(size - held, dtype=bool)])
        self._store = np.concatenate([self._store, np.zeros(size - held, dtype=int)])
        self._rows = np.arange(size)
        self._recent += [deque() for _ in range(size - held)]
        self._free += reversed(range(held, size))

    def predict(self, now: float, ask: Ask) -> tuple[Floats, Floats]:
        """Seconds to the first token and per token after it, on each replica."""
        new = np.full(len(self._rows), float(ask.prompt_tokens))
        if ask.cached:
            for replica, tokens in ask.cached.items():
                new[replica] = max(1.0, ask.prompt_tokens - tokens)
        fetch_s = None
        if ask.stored:
            new, fetch_s = self._fetches(ask, ask.stored, new)
        sequences = np.maximum(self._sequences + self._sent, 0.0)
        running = np.minimum(sequences, self._max_running)
        context_s = self._context_s * self._mean_context
        # A step with as much of a prompt as fits: its chunk, and the decodes that take of the budget and read contexts.
        full_s = self._full_s + context_s * running
        rate = np.maximum(self._chunk - running, 0.1 * self._chunk) / full_s
        queued = np.maximum(np.maximum(self._queued - (now - self._of) * rate, 0.0) + self._sent_tokens, 0.0)
        # Who is silent has little to do.
        prefill_rate = self._prefill_rate * np.exp(np.minimum(_SILENT_S - (now - self._of), 0.0) / _PACE_S)
        prefill_rate += (self._sent_tokens + new) / _PACE_S
        tpot = self._paced(np.minimum(sequences + 1, self._max_running), prefill_rate, full_s, context_s)
        # The step that runs is half over; beyond what may run, or has room, it waits for others to end: one of n in
        # every (answer / n) steps.
        over = np.maximum(sequences + 1 - self._max_running, 0.0) / self._max_running
        kv = np.maximum(self._kv_used + self._sent_tokens + ask.prompt_tokens - self._kv_tokens, 0.0) / self._kv_tokens
        # What is fetched comes while what is queued is computed.
        begins = queued if fetch_s is None else np.maximum(queued, fetch_s * rate)
        ttft = (begins + new) / rate + ((over + kv) * self._output_tokens + 0.5 * (sequences > 0)) * tpot
        self._latest_tpot = tpot
        # Whole predictions are corrected: a part of them would run away where another part decides.
        ttft, tpot = ttft * self._ttft_off, tpot * (self._tpot_off * self._growth)
        return ttft, tpot

    def ranked(self, now: float, ask: Ask, *, late: bool = False) -> list[Predicted]:
        """Best first; with objectives, those alone that would keep them, or else the others behind (`late`)."""
        ttft, tpot = self.predict(now, ask)
        strain = self._strain(ttft, tpot, ask)
        strain[~self._usable] = math.inf
        if ask.context:
            strain[self._longest < ask.context] = math.inf
        if ask.numerics is not None:
            strain[self._numerics != ask.numerics] += _OTHERS
        for replica in ask.last:
            strain[replica] += _LAST
        most = math.inf if late or self.slo is None else 1.0
        order = strain.argsort()[:_RANKS] if len(strain) <= 64 else strain.argpartition(_RANKS)[:_RANKS]
        columns = [
            column[order].tolist() for column in (ttft, tpot, strain, self._ttft_off, self._tpot_off * self._growth)
        ]
        every = zip(order.tolist(), *columns, strict=True)
        chosen = [Predicted(*each) for each in every if each[3] <= most and each[3] < math.inf]
        if self.slo is not None:
            chosen.sort(key=lambda each: each.strain * (1 + _NEAR * self._rng.random()))
        elif chosen:
            # With no objective to keep, what is as good as the best is taken in turns.
            near = min(each.strain for each in chosen) * (1 + _NEAR)
            chosen.sort(key=lambda each: (max(each.strain, near), self._carried[each.replica], self._rng.random()))
        return chosen

    def _strain(self, ttft: Floats, tpot: Floats, ask: Ask) -> Floats:
        slo = self.slo
        strain: Floats
        if slo is None:
            output = self._output_tokens if ask.output_tokens is None else min(self._output_tokens, ask.output_tokens)
            strain = ttft + max(0.0, output - 1) * tpot
        else:
            strain = np.maximum(ttft / (slo.ttft_s * self._ttft_margin), tpot / (slo.tpot_s * self._tpot_margin))
        return strain

    def has_room(self, now: float, tokens: int, ahead: int = 0) -> bool:
        """Whether a replica would begin a prompt of so many tokens at once: nothing waits there, and KV is free.

        ahead  or as soon as so many sequences have ended
        """
        rate = self._chunk / (self._chunk / self._prefill + self._context_s * self._mean_context)
        queued = np.maximum(self._queued - (now - self._of) * rate, 0.0) + self._sent_tokens
        room = self._usable & (self._sequences + self._sent < self._max_running + ahead) & (queued <= self._chunk)
        return bool((room & (self._kv_used + self._sent_tokens + tokens <= self._kv_tokens)).any())

    def sent(self, now: float, replica: int, tokens: int, sequences: int = 1) -> None:
        self._prompt_tokens += (tokens / sequences - self._prompt_tokens) / 200
        self._note(now, replica, tokens, sequences)

    def unsent(self, now: float, replica: int, tokens: int, sequences: int = 1) -> None:
        """It did not go there after all, or was refused."""
        self._note(now, replica, -tokens, -sequences)

    def begun(self, now: float, replica: int, tokens: int) -> None:
        """The prompt that was sent there has been computed."""
        self._note(now, replica, -tokens, 0)

    def done(self, now: float, replica: int, sequences: int = 1) -> None:
        self._note(now, replica, 0, -sequences)

    def _note(self, now: float, replica: int, tokens: float, sequences: float) -> None:
        self._recent[replica].append((now, tokens, sequences))
        self._sent_tokens[replica] += tokens
        self._sent[replica] += sequences
        self._carried[replica] += sequences

    def heard(self, replica: int, load: ReplicaLoad, of: float) -> None:
        computed, since = load.prompt_tokens - load.cached_tokens, of - self._of[replica]
        if since > 0:
            new = max(0.0, computed - self._computed[replica]) / since
            share = 1 - math.exp(-since / _PACE_S)
            self._prefill_rate[replica] += share * (new - self._prefill_rate[replica])
        self._computed[replica] = max(computed, self._computed[replica])
        self._of[replica] = of
        self._queued[replica] = load.queued_prefill_tokens
        self._mean_context[replica] = (load.kv_blocks_total - load.kv_blocks_free) * BLOCK_TOKENS / max(load.running, 1)
        self._sequences[replica] = load.running + load.waiting
        self._kv_used[replica] = (load.kv_blocks_total - load.kv_blocks_free) * BLOCK_TOKENS
        recent = self._recent[replica]
        while recent and recent[0][0] <= of:
            recent.popleft()
        self._sent_tokens[replica] = sum(tokens for _, tokens, _ in recent)
        self._sent[replica] = sum(count for _, _, count in recent)

    def saw_ttft(self, replica: int, predicted: Predicted, observed: float) -> None:
        self._correct(self._ttft_off, replica, observed / predicted.ttft_s * predicted.ttft_off)
        if self.slo is not None:
            self._ttft_margin = _followed(self._ttft_margin, missed=observed > self.slo.ttft_s)

    def saw_tpot(self, replica: int, predicted: Predicted, observed: float, output_tokens: int) -> None:
        if observed > 0:
            # Its company at the end was another than at first: what is off without that is the replica itself.
            then = predicted.tpot_s / predicted.tpot_off
            latest = float(self._latest_tpot[replica]) if replica < len(self._latest_tpot) else then
            self._correct(self._tpot_off, replica, 2 * observed / (then + latest))
            grown = observed / (then * float(self._tpot_off[replica]))
            self._growth = _towards(self._growth, grown, _GROWN, _MOST_GROWN)
        if self.slo is not None:
            self._tpot_margin = _followed(self._tpot_margin, missed=observed > self.slo.tpot_s)
        self._output_tokens += (output_tokens - self._output_tokens) / 200

    def saw_whole(self, replica: int, predicted: Predicted, ratio: float) -> None:
        """An answer came as one: its time over what was predicted. Of what it was made up nobody knows."""
        self._correct(self._ttft_off, replica, ratio * predicted.ttft_off)
        self._correct(self._tpot_off, replica, ratio * predicted.tpot_off / self._growth)

    @staticmethod
    def _correct(column: Floats, replica: int, right: float) -> None:
        """`right`: the correction with which a prediction, made some time ago, would have been right.

        Held against what is predicted now instead, everything on its way would be corrected for once more as it ends:
        with many at a time corrections would swing from one bound to the other.
        """
        column[replica] = _towards(float(column[replica]), right, _CORRECTED, _MOST_OFF)

    def _paced(self, running: Floats, prefill_rate: Floats, full_s: Floats, context_s: Floats) -> Floats:
        """Seconds of the mean step: decodes alone, or tokens of prompts beside them, of which so many come in a second.

        Few prompts: some steps have one, with the tokens that prompts have, and the others none. Many: each step has
        what came while the one before it ran. Steps longer than that would be are full.
        """
        tokens = np.minimum(self._prompt_tokens, np.maximum(self._chunk - running, 1.0))
        rows = np.empty((2, len(running)))
        rows[0], rows[1] = running, running + tokens
        alone_s, with_s = self._step_s(rows) + context_s * running
        few = alone_s / np.maximum(1.0 - prefill_rate / tokens * (with_s - alone_s), 1e-3)
        token_s = np.maximum(full_s - with_s, 0.0) / np.maximum(self._chunk - running - tokens, 1.0)
        many = (with_s - token_s * tokens) / np.maximum(1.0 - token_s * prefill_rate, 1e-3)
        paced = np.where(few * prefill_rate < tokens, few, np.maximum(many, with_s))
        seconds: Floats = np.minimum(paced, np.maximum(full_s, alone_s))
        return seconds

    def _step_s(self, rows: Floats) -> Floats:
        """[any, replicas] of a step with so many tokens, contexts apart: as decodes were measured; beyond, as prompts.

        rows: no less than one.
        """
        at = np.minimum(rows, _MOST_ROWS)
        upper = np.maximum(_KNOTS.searchsorted(at), 1)
        low, high = self._decode[self._rows, upper - 1], self._decode[self._rows, upper]
        seconds: Floats = low + (high - low) * (at - _KNOTS[upper - 1]) / _GAPS[upper] + self._beyond_s * (rows - at)
        return seconds

    def lend(self, replica: int, others: Iterable[int]) -> None:
        """What has been learned of one is the first guess for others like it."""
        for other in others:
            self._ttft_off[other] = self._ttft_off[replica]
            self._tpot_off[other] = self._tpot_off[replica]

    def carried(self, replica: int) -> float:
        """Sequences there, as heard and sent since."""
        return float(self._sequences[replica] + self._sent[replica])

    def own_share(self) -> float:
        """Of all sequences there are, those that were sent from here; 1 where there are none."""
        there = float((self._sequences + self._sent)[self._usable].sum())
        return float(self._carried[self._usable].sum()) / there if there > 0 else 1.0

    def off(self, replica: int) -> tuple[float, float]:
        """Corrections of the time to the first token and of that per token: observed over predicted."""
        return float(self._ttft_off[replica]), float(self._tpot_off[replica])

    def set_usable(self, replica: int, *, usable: bool) -> None:
        """One that drains, is not well or cannot serve the model is never chosen."""
        self._usable[replica] = usable


def _towards(factor: float, right: float, share: float, most: float) -> float:
    """A share of the way, in proportion; of a factor of e at most."""
    if right <= 0:
        return factor
    step = share * max(-1.0, min(1.0, math.log(right / factor)))
    return min(max(factor * math.exp(step), 1 / most), most)


def _followed(margin: float, *, missed: bool) -> float:
    """So much stricter, or less strict, that in the long run _MISSES of the admitted miss."""
    step = -(1 - _MISSES) if missed else _MISSES
    return min(max(margin * math.exp(_LEARNED * step), _MARGINS[0]), _MARGINS[1])
