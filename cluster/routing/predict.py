"""Which replica will finish a request soonest: what is known of each, as columns, and the choice. Pure, no Ray.

A directory holds what replicas have published (their profiles once, their load now and then) and what this ingress
itself has sent since; a prediction is arithmetic on these columns, one pass for all replicas.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from ...replicas.protocol import BATCHES, BLOCK_TOKENS, ReplicaLoad
from .terms import PIECES, Ask, Floats, Predicted, Slo, Speed, pieces

__all__ = ["Ask", "Directory", "Predicted", "Slo", "Speed"]

_CORRECTED = 0.05  # how much of a correction one observation is
_GROWN = 0.01  # how much of the growth that all replicas have in common,
_MOST_GROWN = 2.0  # and the most of it
_MOST_OFF = 5.0  # corrections stay within this factor
_PROMPTS = 30.0  # whose mean length is kept
_PACE_S = 3.0  # over which the rate of prompts' tokens is taken
_SILENT_S = 1.0  # a replica that has not been heard for longer does what it did less and less
RANKS = 8  # replicas that are tried for one request
_NEAR = 0.05  # predictions that are so close are the same, and fall at random
_MISSES = 0.003  # share of the admitted that may miss an objective: whoever misses has been in others' way besides,
_LEARNED = 0.02  # and how fast the margin follows what they do
_OFTEN = 25.0  # requests/s: of more, each tells less. What comes of them is seen seconds later, of all of them at once
_MARGIN = 0.85  # at first
_OTHERS, _LAST = 1e6, 1e9  # strains of replicas that come after all others
_MARGINS = (0.5, 1.0)  # of the objective: predicted to take longer, a request counts as one that will miss it

_ENDS = np.asarray(BATCHES[1:], dtype=float)  # of the pieces that a step's time is linear in, but for the last

# Operands that are arrays: numpy takes longer to convert a number of Python's than to add it to sixteen others.
_ZERO, _ONE, _HALF, _LITTLE, _SILENT, _PACE = map(np.array, (0.0, 1.0, 0.5, 1e-3, _SILENT_S, _PACE_S))

_ALL = slice(None)

# Columns of a directory, and what they hold of a replica that has just come.
_COLUMNS = {
    "_prefill": 1.0, "_context_s": 0.0, "_chunk": 1.0, "_least_chunk": 0.1, "_full_s": 1.0, "_max_running": 1.0,
    "_kv_tokens": 1.0, "_longest": math.inf, "_numerics": 0.0, "_of": 0.0, "_queued": 0.0, "_sequences": 0.0,
    "_kv_used": 0.0, "_mean_context": 0.0, "_contexts_s": 0.0, "_computed": 0.0, "_prefill_rate": 0.0, "_carried": 0.0,
    "_sent_tokens": 0.0, "_sent": 0.0, "_prompt": 500.0, "_prompts": 2.0, "_ttft_off": 1.0, "_tpot_off": 1.0,
    "_fetch_s": 0.0, "_barred": math.inf,
}  # fmt: skip


class Directory:
    """Replicas by number; the number of one that has gone is given to another. Times are the caller's, in seconds."""

    # A column each: of the profiles,
    _prefill: Floats
    _context_s: Floats
    _chunk: Floats
    _least_chunk: Floats  # of it that prompts get, however many sequences there are
    _full_s: Floats  # a step's that is full
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
    _contexts_s: Floats  # of a step, for each sequence, with a context of that length
    _computed: Floats  # tokens of prompts since the replica began
    _prefill_rate: Floats  # of these per second, of late
    _fetch_s: Floats  # of a token, from its prefix store; 0: nothing is fetched
    _barred: Floats  # 0, or infinity where it is not usable
    # sent from here: in all, and what is not in what was heard,
    _carried: Floats
    _sent_tokens: Floats
    _sent: Floats
    _prompt: Floats  # tokens of the mean one of late, sent from here: slow cards get the short ones,
    _prompts: Floats  # and of how many that is the mean
    # and corrections: observed over predicted.
    _ttft_off: Floats
    _tpot_off: Floats

    def __init__(self, speeds: Sequence[Speed], slo: Slo | None, rng: random.Random) -> None:
        self.slo = slo
        self.ranks = RANKS
        self._rng = rng
        self._free: list[int] = []
        self._recent: list[deque[tuple[float, float, float]]] = []
        self._steps = np.ones((2, 0))  # of each replica's pieces, where they begin and how they rise
        self._usable = np.zeros(0, dtype=bool)
        self._store = np.zeros(0, dtype=int)
        self._last_store = 0
        for name in _COLUMNS:
            setattr(self, name, np.zeros(0))
        self._grow(len(speeds))
        self._output_tokens = 150.0  # of those of late
        self._growth = 1.0  # of the time per token while answers come, for whatever joins them meanwhile
        self._sent_s, self._gap_s = -math.inf, 1.0  # when the last request was sent, and the time between two
        self._least_longest = math.inf
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
        self.set_speed(row, speed)
        self._longest[row] = longest
        self._numerics[row] = numerics
        self._recent[row].clear()
        self.set_usable(row, usable=True)
        self._least_longest = min(self._least_longest, longest)
        return row

    def set_speed(self, replica: int, speed: Speed) -> None:
        """What is known of it beforehand; corrections stay."""
        self._prefill[replica] = speed.prefill_tokens_per_s
        self._context_s[replica] = speed.context_s
        self._contexts_s[replica] = speed.context_s * self._mean_context[replica]
        self._chunk[replica] = speed.chunk
        self._least_chunk[replica] = 0.1 * speed.chunk
        self._full_s[replica] = full_s = speed.chunk / speed.prefill_tokens_per_s
        self._steps[:, replica * PIECES : (replica + 1) * PIECES] = pieces(speed, full_s)
        self._max_running[replica] = speed.max_running
        self._kv_tokens[replica] = speed.kv_tokens

    def remove(self, replica: int) -> None:
        """It has gone."""
        assert replica not in self._free
        self.set_usable(replica, usable=False)
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
        self._steps = np.concatenate([self._steps, np.ones((2, (size - held) * PIECES))], axis=1)
        self._usable = np.concatenate([self._usable, np.zeros(size - held, dtype=bool)])
        self._store = np.concatenate([self._store, np.zeros(size - held, dtype=int)])
        self._rows = np.arange(size)
        self._first_pieces = self._rows * PIECES
        self._recent += [deque() for _ in range(size - held)]
        self._free += reversed(range(held, size))

    def predict(self, now: float, ask: Ask) -> tuple[Floats, Floats]:
        """Seconds to the first token and per token after it, on each replica."""
        new = np.empty(len(self._rows))
        new.fill(ask.prompt_tokens)
        if ask.cached:
            for replica, tokens in ask.cached.items():
                new[replica] = max(1.0, ask.prompt_tokens - tokens)
        fetch_s = None
        if ask.stored:
            new, fetch_s = self._fetches(ask, ask.stored, new)
        sequences = np.maximum(self._sequences + self._sent, _ZERO)
        running = np.minimum(sequences, self._max_running)
        context_s = self._contexts_s
        # A step with as much of a prompt as fits: its chunk, and the decodes that take of the budget and read contexts.
        full_s = self._full_s + context_s * running
        room = np.maximum(self._chunk - running, self._least_chunk)
        rate = room / full_s
        silent_s = np.array(now) - self._of
        queued = np.maximum(np.maximum(self._queued - silent_s * rate, _ZERO) + self._sent_tokens, _ZERO)
        # Who is silent has little to do.
        prefill_rate = self._prefill_rate
        if np.count_nonzero(silent_s > _SILENT):
            prefill_rate = prefill_rate * np.exp(np.minimum(_SILENT - silent_s, _ZERO) / _PACE)
        prefill_rate = prefill_rate + (self._sent_tokens + new) / _PACE
        more = sequences + _ONE
        one_more = np.minimum(more, self._max_running)
        rest = new % room
        tpot, rest_s = self._paced(_ALL, one_more, rest, prefill_rate, full_s, context_s)
        # The step that runs is half over; beyond what may run, or has room, it waits for others to end: one of n in
        # every (answer / n) steps.
        steps = _ZERO
        over, kv = more - one_more, self._kv_used + self._sent_tokens + np.array(float(ask.prompt_tokens))
        if np.count_nonzero(over) or np.count_nonzero(kv > self._kv_tokens):
            kv = np.maximum(kv - self._kv_tokens, _ZERO) / self._kv_tokens
            steps = (over / self._max_running + kv) * self._output_tokens
        # Prompts in line are computed, and what is fetched comes, while others end.
        line_s = np.maximum(queued / rate, steps * tpot)
        if fetch_s is not None:
            line_s = np.maximum(line_s, fetch_s)
        ttft = line_s + (new - rest) / rate + rest_s + np.minimum(sequences, _HALF) * tpot
        # Whole predictions are corrected: a part of them would run away where another part decides.
        ttft, tpot = ttft * self._ttft_off, tpot * (self._tpot_off * np.array(self._growth))
        return ttft, tpot

    def ranked(self, now: float, ask: Ask, *, late: bool = False) -> list[Predicted]:
        """Best first; with objectives, those alone that would keep them, or else the others behind (`late`)."""
        ttft, tpot = self.predict(now, ask)
        strain = self._strain(ttft, tpot, ask)
        strain += self._barred
        if ask.context > self._least_longest:
            strain[self._longest < ask.context] = math.inf
        if ask.numerics is not None or ask.others or ask.last:
            _put_last(strain, self._numerics, ask)
        most = math.inf if late or self.slo is None else 1.0
        order = strain.argsort() if len(strain) <= max(64, self.ranks) else strain.argpartition(self.ranks)
        order = order[: self.ranks]
        columns = [
            column[order].tolist()
            for column in (ttft, tpot, strain, self._ttft_off, self._tpot_off * np.array(self._growth))
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
            most_ttft_s, most_tpot_s = slo.ttft_s * self._ttft_margin, slo.tpot_s * self._tpot_margin
            slow = tpot / np.array(most_tpot_s)
            # Short of its objective, the time per token counts less than what is in line: it stays as it is when
            # predictions err, while a long line becomes longer. Where it is kept, and not, is the same.
            strain = np.maximum(ttft / np.array(most_ttft_s), np.where(slow < _ONE, slow * slow, slow))
        return strain

    def has_room(self, now: float, tokens: int, ahead: int = 0) -> bool:
        """Whether a replica would begin a prompt of so many tokens at once: nothing waits there, and KV is free.

        ahead  or as soon as so many sequences have ended
        """
        rate = self._chunk / (self._chunk / self._prefill + self._contexts_s)
        queued = np.maximum(self._queued - (now - self._of) * rate, 0.0) + self._sent_tokens
        room = self._usable & (self._sequences + self._sent < self._max_running + ahead) & (queued <= self._chunk)
        return bool((room & (self._kv_used + self._sent_tokens + tokens <= self._kv_tokens)).any())

    def sent(self, now: float, replica: int, tokens: int, sequences: int = 1) -> None:
        self._prompts[replica] = count = min(self._prompts[replica] + sequences, _PROMPTS)
        self._prompt[replica] += (tokens - sequences * self._prompt[replica]) / count
        self._gap_s += (min(now - self._sent_s, 1.0) - self._gap_s) / 50
        self._sent_s = now
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
        kv_used = (load.kv_blocks_total - load.kv_blocks_free) * BLOCK_TOKENS
        self._mean_context[replica] = mean_context = kv_used / max(load.running, 1)
        self._contexts_s[replica] = self._context_s[replica] * mean_context
        self._sequences[replica] = load.running + load.waiting
        self._kv_used[replica] = kv_used
        recent = self._recent[replica]
        while recent and recent[0][0] <= of:
            recent.popleft()
        self._sent_tokens[replica] = sum(tokens for _, tokens, _ in recent)
        self._sent[replica] = sum(count for _, _, count in recent)

    def saw_ttft(self, replica: int, predicted: Predicted, observed: float) -> None:
        self._correct(self._ttft_off, replica, observed / predicted.ttft_s * predicted.ttft_off)
        if self.slo is not None:
            self._ttft_margin = _followed(self._ttft_margin, self._weight, missed=observed > self.slo.ttft_s)

    def saw_tpot(self, replica: int, predicted: Predicted, observed: float, output_tokens: int) -> None:
        """To be told before `done`: who has ended is of the company that it had."""
        if observed > 0:
            # Its company at the end was another than at first: what is off without that is the replica itself.
            then = predicted.tpot_s / predicted.tpot_off
            self._correct(self._tpot_off, replica, 2 * observed / (then + self._pace_s(replica)))
            grown = observed / (then * float(self._tpot_off[replica]))
            self._growth = _towards(self._growth, grown, _GROWN * self._weight, _MOST_GROWN)
        if self.slo is not None:
            self._tpot_margin = _followed(self._tpot_margin, self._weight, missed=observed > self.slo.tpot_s)
        self._output_tokens += (output_tokens - self._output_tokens) / 200

    def saw_whole(self, replica: int, predicted: Predicted, ratio: float) -> None:
        """An answer came as one: its time over what was predicted. Of what it was made up nobody knows."""
        self._correct(self._ttft_off, replica, ratio * predicted.ttft_off)
        self._correct(self._tpot_off, replica, ratio * predicted.tpot_off / self._growth)

    @property
    def _weight(self) -> float:
        """Of one observation, in what all replicas have in common."""
        return min(1.0, self._gap_s * _OFTEN)

    @staticmethod
    def _correct(column: Floats, replica: int, right: float) -> None:
        """`right`: the correction with which a prediction, made some time ago, would have been right.

        Held against what is predicted now instead, everything on its way would be corrected for once more as it ends:
        with many at a time corrections would swing from one bound to the other.
        """
        column[replica] = _towards(float(column[replica]), right, _CORRECTED, _MOST_OFF)

    def _pace_s(self, replica: int) -> float:
        """Of its mean step with whom it has now and a prompt like those that come, without corrections."""
        of = slice(replica, replica + 1)
        running = np.clip(self._sequences[of] + self._sent[of], _ONE, self._max_running[of])
        context_s = self._contexts_s[of]
        rate = self._prefill_rate[of] + (self._sent_tokens[of] + self._prompt[of]) / _PACE
        return float(self._paced(of, running, _ZERO, rate, self._full_s[of] + context_s * running, context_s)[0][0])

    def _paced(
        self, of: slice, running: Floats, rest: Floats, prefill_rate: Floats, full_s: Floats, context_s: Floats
    ) -> tuple[Floats, Floats]:
        """Seconds of the mean step: decodes alone, or tokens of prompts beside them, of which so many come in a second.

        And of a step with `rest` tokens of a prompt: where kernels for many rows begin, few take as long as many.

        A step has prompts in it if any came while the one before it ran, or were left over: more often the more of what
        it could compute comes. Of more than one at a time each token after the first one's takes as long as in a full
        step. The share of such steps is the one at which it stays.
        """
        left = self._chunk[of] - running
        tokens = np.minimum(self._prompt[of], np.maximum(left, _ONE))
        rows = np.empty((3, len(running)))
        rows[0] = running
        np.add(running, tokens, out=rows[1])
        np.add(running - _ONE, rest, out=rows[2])  # it decodes later
        alone_s, with_s, rest_s = steps_s = self._step_s(of, rows) + context_s * running
        token_s = np.maximum(full_s - with_s, _ZERO) / np.maximum(left - tokens, _ONE)
        none_alone, none_with = np.exp(steps_s[:2] * (prefill_rate / -tokens))
        used = np.minimum(prefill_rate * full_s / np.maximum(left, _ONE), _ONE)
        none_with *= _ONE - used * used
        share = (_ONE - none_alone) / (_ONE - none_alone + none_with)
        paced = alone_s + share * (with_s - alone_s - token_s * tokens)
        paced /= np.maximum(_ONE - token_s * prefill_rate, _LITTLE)
        seconds: Floats = np.maximum(np.minimum(paced, full_s), alone_s)
        return seconds, np.where(rest > 0, rest_s, _ZERO)

    def _step_s(self, of: slice, rows: Floats) -> Floats:
        """[any, replicas] of a step with so many tokens, contexts apart: as decodes were measured; beyond, as prompts.

        rows: no less than one.
        """
        starts, rises = self._steps.take(_ENDS.searchsorted(rows) + self._first_pieces[of], axis=1)
        seconds: Floats = starts + rises * rows
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
        self._barred[replica] = 0.0 if usable else math.inf


def _put_last(strain: Floats, numerics: Floats, ask: Ask) -> None:
    """Those that come after others: of another class, of other weights, and any that are to be last."""
    if ask.numerics is not None:
        strain[numerics != ask.numerics] += _OTHERS
    for replica in ask.others:
        strain[replica] += 2 * _OTHERS
    for replica in ask.last:
        strain[replica] += _LAST
    if (least := strain.min(initial=math.inf)) >= _OTHERS and least < math.inf:
        strain -= least // _OTHERS * _OTHERS  # else the best of what is left would be alike, whatever they are


def _towards(factor: float, right: float, share: float, most: float) -> float:
    """A share of the way, in proportion; of a factor of e at most."""
    if right <= 0:
        return factor
    step = share * max(-1.0, min(1.0, math.log(right / factor)))
    return min(max(factor * math.exp(step), 1 / most), most)


def _followed(margin: float, weight: float, *, missed: bool) -> float:
    """So much stricter, or less strict, that in the long run _MISSES of the admitted miss."""
    step = -(1 - _MISSES) if missed else _MISSES
    return min(max(margin * math.exp(_LEARNED * weight * step), _MARGINS[0]), _MARGINS[1])
