"""Prediction of when each replica would begin a request, and how fast it would go on. Pure, no Ray.

A `LatencyModel` holds what replicas have published (their profiles once, their load from time to time) and what this
ingress has sent since, one column for each quantity. A prediction is arithmetic on these columns, in one pass for all
replicas; which of them a request goes to is decided by a policy (`routing.policy`).
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import numpy as np

from ....replicas.types import BLOCK_TOKENS, PROFILED_BATCH_SIZES, ReplicaLoad, ReplicaProfile
from .routing_candidates import LAST, OTHERS, RoutingCandidates
from .routing_query import PIECES, FloatArray, LatencyPrediction, ReplicaSpeed, RoutingQuery, Slo, step_time_pieces

__all__ = ["LatencyModel", "LatencyPrediction", "ReplicaSpeed", "RoutingQuery", "Slo"]

_CORRECTED = 0.05  # weight of one observation in a replica's correction
_GROWN = 0.01  # weight of one observation in the growth that all replicas have in common
_MAX_GROWTH = 2.0  # maximum of that growth, as a factor
_MAX_CORRECTION = 5.0  # corrections stay within this factor
_PROMPTS = 30.0  # number of recent prompts that their mean length is taken over
_PACE_S = 3.0  # time over which the rate of prompt tokens is averaged
_SILENT_S = 1.0  # after this time without news, the rate of a replica's prefill is assumed to decay
_MISSES = 0.003  # target share of admitted requests that miss an objective: each of these also delays others
_LEARNED = 0.02  # step by which the margin follows the misses
_OFTEN = 25.0  # requests/s above which each observation counts less, since their results arrive late and together
_MARGIN = 0.85  # initial margin, as a share of the objective
_USUAL = PROFILED_BATCH_SIZES.index(64)  # batch at which cards differ about as in operation
_USUAL_CONTEXT = 500.0  # tokens of each of its sequences
_MARGINS = (0.5, 1.0)  # bounds of the margin: a request that is predicted to exceed its share counts as a miss

_ENDS = np.asarray(
    PROFILED_BATCH_SIZES[1:], dtype=float
)  # ends of the pieces where a step's time is linear, except the last

# Constants as arrays: numpy takes longer to convert a Python number than to add it to sixteen values.
_ZERO, _ONE, _HALF, _LITTLE, _SILENT, _PACE = map(np.array, (0.0, 1.0, 0.5, 1e-3, _SILENT_S, _PACE_S))

_ALL = slice(None)
_ANY = sys.float_info.max  # any strain but an infinite one

# Columns of a directory, and their values for a replica that has just joined.
_COLUMNS = {
    "_prefill": 1.0, "_context_s": 0.0, "_chunk": 1.0, "_min_prefill_chunk": 0.1, "_full_s": 1.0, "_max_running": 1.0,
    "_kv_tokens": 1.0, "_longest": math.inf, "_numerics": 0.0, "_of": 0.0, "_queued": 0.0, "_sequences": 0.0,
    "_kv_used": 0.0, "_mean_context": 0.0, "_contexts_s": 0.0, "_computed": 0.0, "_prefill_rate": 0.0, "_carried": 0.0,
    "_sent_tokens": 0.0, "_sent": 0.0, "_prompt": 500.0, "_prompts": 2.0, "_ttft_off": 1.0, "_tpot_off": 1.0,
    "_fetch_s": 0.0, "_barred": math.inf, "_token_s": 1.0,
}  # fmt: skip


class LatencyModel:
    """Prediction model of an ingress: columns of what is known of each replica, which is addressed by its row number.

    The row of a replica that is removed is given to another. Times are passed in by the caller, in seconds.

    slo       latency objectives; None: the replica that finishes first is best
    profiles  profiles of the replicas that there are at first, for policies
    """

    # One column each. From the profiles:
    _prefill: FloatArray
    _context_s: FloatArray
    _chunk: FloatArray
    _min_prefill_chunk: FloatArray  # tokens of a step that prompts get at least, however many sequences decode
    _full_s: FloatArray  # seconds of a full step
    _max_running: FloatArray
    _kv_tokens: FloatArray
    _longest: FloatArray
    _numerics: FloatArray
    _token_s: FloatArray  # seconds of the replica's time that a token of an answer takes, in a batch of usual size
    # From the latest known load:
    _of: FloatArray  # time of that load
    _queued: FloatArray
    _sequences: FloatArray
    _kv_used: FloatArray
    _mean_context: FloatArray
    _contexts_s: FloatArray  # seconds that each sequence adds to a step, with a context of mean length
    _computed: FloatArray  # prompt tokens computed since the replica began
    _prefill_rate: FloatArray  # prompt tokens computed per second, recently
    _fetch_s: FloatArray  # seconds per token fetched from its prefix store; 0: nothing is fetched
    _barred: FloatArray  # 0, or infinity where it is not usable
    # Sent by this ingress: sequences in all, and tokens and sequences that are not in the latest load.
    _carried: FloatArray
    _sent_tokens: FloatArray
    _sent: FloatArray
    _prompt: FloatArray  # mean tokens of recent prompts sent there: slow cards get the short ones
    _prompts: FloatArray  # number of prompts in that mean
    # Corrections: observed over predicted.
    _ttft_off: FloatArray
    _tpot_off: FloatArray

    def __init__(
        self, speeds: Sequence[ReplicaSpeed], slo: Slo | None, profiles: Sequence[ReplicaProfile] = ()
    ) -> None:
        self.slo = slo
        self._profiles: tuple[ReplicaProfile | None, ...] = ()
        self._free: list[int] = []
        self._recent: list[deque[tuple[float, float, float]]] = []
        self._steps = np.ones((2, 0))  # offset and slope of each piece of each replica's step time
        self._usable = np.zeros(0, dtype=bool)
        self._store = np.zeros(0, dtype=int)
        self._last_store = 0
        for name in _COLUMNS:
            setattr(self, name, np.zeros(0))
        self._grow(len(speeds))
        self._output_tokens = 150.0  # mean tokens of recent answers
        self._growth = 1.0  # factor by which the time per token grows during an answer, since other requests join
        self._sent_s, self._gap_s = -math.inf, 1.0  # when the last request was sent, and mean time between requests
        self._shortest_context = math.inf
        self._ttft_margin = self._tpot_margin = _MARGIN
        for speed, profile in zip_longest(speeds, profiles):
            self.add(speed, profile=profile)

    def add(
        self,
        speed: ReplicaSpeed,
        *,
        longest: float = math.inf,
        numerics: int = 0,
        profile: ReplicaProfile | None = None,
    ) -> int:
        """Add a replica and return its row.

        longest   tokens that its context holds
        numerics  number of its numerics class
        profile   profile that policies may read; nothing is predicted by it
        """
        if not self._free:
            self._grow(max(8, 2 * len(self._rows)))
        row = self._free.pop()
        for name, first in _COLUMNS.items():
            getattr(self, name)[row] = first
        self.set_speed(row, speed)
        self._longest[row] = longest
        self._numerics[row] = numerics
        self._recent[row].clear()
        self._profiles = (*self._profiles[:row], profile, *self._profiles[row + 1 :])
        self.set_usable(row, usable=True)
        self._shortest_context = min(self._shortest_context, longest)
        return row

    def set_speed(self, replica: int, speed: ReplicaSpeed) -> None:
        """Set the speed that a replica's profile states; its corrections stay."""
        self._prefill[replica] = speed.prefill_tokens_per_s
        self._context_s[replica] = speed.context_s
        self._contexts_s[replica] = speed.context_s * self._mean_context[replica]
        self._chunk[replica] = speed.chunk
        self._min_prefill_chunk[replica] = 0.1 * speed.chunk
        self._full_s[replica] = full_s = speed.chunk / speed.prefill_tokens_per_s
        self._steps[:, replica * PIECES : (replica + 1) * PIECES] = step_time_pieces(speed, full_s)
        share_s = speed.decode_s[_USUAL] / PROFILED_BATCH_SIZES[_USUAL]
        self._token_s[replica] = share_s + speed.context_s * _USUAL_CONTEXT
        self._max_running[replica] = speed.max_running
        self._kv_tokens[replica] = speed.kv_tokens

    def remove(self, replica: int) -> None:
        """Remove a replica and free its row."""
        assert replica not in self._free
        self._profiles = (*self._profiles[:replica], None, *self._profiles[replica + 1 :])
        self.set_usable(replica, usable=False)
        self._free.append(replica)

    def reads(self, replica: int, store: int, fetch_s: float) -> None:
        """Set the number of the prefix store that a replica reads, and the seconds that fetching a token takes.

        A replica that would compute tokens faster than it fetches them is taken to compute them.
        """
        self._store[replica] = store
        self._last_store = max(self._last_store, store)
        self._fetch_s[replica] = fetch_s if fetch_s * self._prefill[replica] < 1 else 0.0

    def computes(self, replica: int, query: RoutingQuery) -> int:
        """Return the prompt tokens that a replica would compute rather than have cached or fetch; at least one."""
        cached = (query.cached or {}).get(replica, 0)
        if query.stored and self._fetch_s[replica] > 0:
            cached = max(cached, query.stored.get(int(self._store[replica]), 0))
        return max(1, query.prompt_tokens - cached)

    def _fetches(self, query: RoutingQuery, stored: dict[int, int], new: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return for each replica the prompt tokens left to compute after fetching, and the seconds to fetch."""
        depths = np.zeros(max(self._last_store, *stored) + 1)
        for store, tokens in stored.items():
            depths[store] = tokens
        left = np.minimum(new, np.maximum(query.prompt_tokens - depths[self._store], 1.0))
        left = np.where(self._fetch_s > 0, left, new)
        return left, (new - left) * self._fetch_s

    def _grow(self, size: int) -> None:
        """Make all columns `size` rows long; unused rows get values that calculations can take."""
        num_rows = len(self._recent)
        for name, first in _COLUMNS.items():
            column = np.full(size, first)
            column[:num_rows] = getattr(self, name)
            setattr(self, name, column)
        self._steps = np.concatenate([self._steps, np.ones((2, (size - num_rows) * PIECES))], axis=1)
        self._usable = np.concatenate([self._usable, np.zeros(size - num_rows, dtype=bool)])
        self._store = np.concatenate([self._store, np.zeros(size - num_rows, dtype=int)])
        self._rows = np.arange(size)
        self._first_pieces = self._rows * PIECES
        self._recent += [deque() for _ in range(size - num_rows)]
        self._profiles += (None,) * (size - num_rows)
        self._free += reversed(range(num_rows, size))

    def predict(self, now: float, query: RoutingQuery) -> tuple[FloatArray, FloatArray]:
        """Return the time to first token and the time per token after it on each replica, in seconds."""
        ttft, tpot, *_ = self.predict_parts(now, query)
        return ttft, tpot

    def predict_parts(self, now: float, query: RoutingQuery) -> tuple[FloatArray, ...]:
        """Return the time to first token and the time per token, and then the `parts` of `RoutingCandidates`."""
        new = np.empty(len(self._rows))
        new.fill(query.prompt_tokens)
        if query.cached:
            for replica, tokens in query.cached.items():
                new[replica] = max(1.0, query.prompt_tokens - tokens)
        fetch_s = None
        if query.stored:
            new, fetch_s = self._fetches(query, query.stored, new)
        sequences = np.maximum(self._sequences + self._sent, _ZERO)
        running = np.minimum(sequences, self._max_running)
        context_s = self._contexts_s
        # A full step of prefill: its chunk of a prompt, and the decodes that share its budget and read their contexts.
        full_s = self._full_s + context_s * running
        prefill_chunk = np.maximum(self._chunk - running, self._min_prefill_chunk)
        rate = prefill_chunk / full_s
        silent_s = np.array(now) - self._of
        queued = np.maximum(np.maximum(self._queued - silent_s * rate, _ZERO) + self._sent_tokens, _ZERO)
        # A replica without news is assumed to have little to do.
        prefill_rate = self._prefill_rate
        if np.count_nonzero(silent_s > _SILENT):
            prefill_rate = prefill_rate * np.exp(np.minimum(_SILENT - silent_s, _ZERO) / _PACE)
        prefill_rate = prefill_rate + (self._sent_tokens + new) / _PACE
        more = sequences + _ONE
        one_more = np.minimum(more, self._max_running)
        rest = new % prefill_chunk
        tpot, rest_s = self._paced(_ALL, one_more, rest, prefill_rate, full_s, context_s)
        # The step that runs is half over. Where more sequences or tokens wait than may run or fit, the request waits
        # for others to end: of n sequences, one ends in every (answer / n) steps.
        steps = _ZERO
        over, kv = more - one_more, self._kv_used + self._sent_tokens + np.array(float(query.prompt_tokens))
        if np.count_nonzero(over) or np.count_nonzero(kv > self._kv_tokens):
            kv = np.maximum(kv - self._kv_tokens, _ZERO) / self._kv_tokens
            steps = (over / self._max_running + kv) * self._output_tokens
        # Queued prompts are computed, and stored KV is fetched, while other sequences end.
        start_s = queue_s = np.maximum(queued / rate, steps * tpot)
        if fetch_s is not None:
            start_s = np.maximum(queue_s, fetch_s)
        ttft = start_s + (new - rest) / rate + rest_s + np.minimum(sequences, _HALF) * tpot
        # The whole prediction is corrected: the correction of one part would diverge where another part decides.
        ttft, tpot = ttft * self._ttft_off, tpot * (self._tpot_off * np.array(self._growth))
        return (ttft, tpot, new, queue_s) if fetch_s is None else (ttft, tpot, new, queue_s, start_s - queue_s)

    def candidates(self, now: float, query: RoutingQuery, *, allow_late: bool = True) -> RoutingCandidates:
        """Return what a routing policy sees of all replicas, for one request at one moment.

        allow_late  also replicas that are predicted to miss the objectives may be chosen
        """
        ttft, tpot, *parts = self.predict_parts(now, query)
        strain = self._strain(ttft, tpot, query)
        strain += self._barred
        if query.context > self._shortest_context:
            strain[self._longest < query.context] = math.inf
        if query.numerics is not None or query.others or query.last:
            _put_last(strain, self._numerics, query)
        return RoutingCandidates(
            ttft, tpot, strain, _ANY if allow_late or self.slo is None else 1.0, self.slo, tuple(parts),
            self._ttft_off, self._tpot_off, self._growth, self._sequences, self._sent, self._carried, self._queued,
            self._prefill, self._token_s, self._output_tokens, self._profiles,
        )  # fmt: skip

    def _strain(self, ttft: FloatArray, tpot: FloatArray, query: RoutingQuery) -> FloatArray:
        slo = self.slo
        strain: FloatArray
        if slo is None:
            output = (
                self._output_tokens if query.output_tokens is None else min(self._output_tokens, query.output_tokens)
            )
            strain = ttft + max(0.0, output - 1) * tpot
        else:
            max_ttft_s, max_tpot_s = slo.ttft_s * self._ttft_margin, slo.tpot_s * self._tpot_margin
            slow = tpot / np.array(max_tpot_s)
            # Below its objective, the time per token counts less than the queue does (it is squared): it stays as it is
            # when predictions err, while a long queue grows. Which replicas meet the objective does not change.
            strain = np.maximum(ttft / np.array(max_ttft_s), np.where(slow < _ONE, slow * slow, slow))
        return strain

    def has_capacity(self, now: float, tokens: int, ahead: int = 0) -> bool:
        """Return whether some replica would begin a prompt of `tokens` tokens at once: no queue, and free KV blocks.

        ahead  also True if it would begin as soon as this many sequences have ended
        """
        rate = self._chunk / (self._chunk / self._prefill + self._contexts_s)
        queued = np.maximum(self._queued - (now - self._of) * rate, 0.0) + self._sent_tokens
        free = self._usable & (self._sequences + self._sent < self._max_running + ahead) & (queued <= self._chunk)
        return bool((free & (self._kv_used + self._sent_tokens + tokens <= self._kv_tokens)).any())

    def sent(self, now: float, replica: int, tokens: int, sequences: int = 1) -> None:
        self._prompts[replica] = count = min(self._prompts[replica] + sequences, _PROMPTS)
        self._prompt[replica] += (tokens - sequences * self._prompt[replica]) / count
        self._gap_s += (min(now - self._sent_s, 1.0) - self._gap_s) / 50
        self._sent_s = now
        self._note(now, replica, tokens, sequences)

    def withdraw_sent(self, now: float, replica: int, tokens: int, sequences: int = 1) -> None:
        """Undo `sent` for a request that did not go to the replica after all, or was refused there."""
        self._note(now, replica, -tokens, -sequences)

    def begun(self, now: float, replica: int, tokens: int) -> None:
        """Record that a prompt which was sent to the replica has been computed."""
        self._note(now, replica, -tokens, 0)

    def done(self, now: float, replica: int, sequences: int = 1) -> None:
        self._note(now, replica, 0, -sequences)

    def _note(self, now: float, replica: int, tokens: float, sequences: float) -> None:
        self._recent[replica].append((now, tokens, sequences))
        self._sent_tokens[replica] += tokens
        self._sent[replica] += sequences
        self._carried[replica] += sequences

    def heard(self, replica: int, load: ReplicaLoad, of: float) -> None:
        computed, elapsed_s = load.prompt_tokens - load.cached_tokens, of - self._of[replica]
        if elapsed_s > 0:
            new = max(0.0, computed - self._computed[replica]) / elapsed_s
            share = 1 - math.exp(-elapsed_s / _PACE_S)
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

    def observe_ttft(self, replica: int, predicted: LatencyPrediction, observed: float) -> None:
        self._correct(self._ttft_off, replica, observed / predicted.ttft_s * predicted.ttft_off)
        if self.slo is not None:
            self._ttft_margin = _followed(self._ttft_margin, self._weight, missed=observed > self.slo.ttft_s)

    def observe_tpot(self, replica: int, predicted: LatencyPrediction, observed: float, output_tokens: int) -> None:
        """Correct the prediction of a replica's time per token by the one that was observed, in seconds.

        Call it before `done`, since the sequence that has ended still counts among those that ran beside it.
        """
        if observed > 0:
            # Other sequences ran beside it at the end than at first. The error that remains is the replica's own.
            then = predicted.tpot_s / predicted.tpot_off
            self._correct(self._tpot_off, replica, 2 * observed / (then + self._pace_s(replica)))
            grown = observed / (then * float(self._tpot_off[replica]))
            self._growth = _towards(self._growth, grown, _GROWN * self._weight, _MAX_GROWTH)
        if self.slo is not None:
            self._tpot_margin = _followed(self._tpot_margin, self._weight, missed=observed > self.slo.tpot_s)
        self._output_tokens += (output_tokens - self._output_tokens) / 200

    def observe_whole_response(self, replica: int, predicted: LatencyPrediction, ratio: float) -> None:
        """Correct both predictions of a replica by an answer that came in one message, so that its parts are not known.

        ratio  its observed time over the predicted time
        """
        self._correct(self._ttft_off, replica, ratio * predicted.ttft_off)
        self._correct(self._tpot_off, replica, ratio * predicted.tpot_off / self._growth)

    @property
    def _weight(self) -> float:
        """Weight of one observation in what all replicas have in common.

        Lower the more requests are sent per second.
        """
        return min(1.0, self._gap_s * _OFTEN)

    @staticmethod
    def _correct(column: FloatArray, replica: int, right: float) -> None:
        """Move a correction towards the one with which a prediction made some time ago would have been right.

        If observations were compared with what is predicted now instead, all requests under way would cause the same
        correction once more as they end: with many at a time, corrections would swing from one bound to the other.
        """
        column[replica] = _towards(float(column[replica]), right, _CORRECTED, _MAX_CORRECTION)

    def _pace_s(self, replica: int) -> float:
        """Return the seconds of a replica's mean step with its current sequences and usual prompts, uncorrected."""
        of = slice(replica, replica + 1)
        running = np.clip(self._sequences[of] + self._sent[of], _ONE, self._max_running[of])
        context_s = self._contexts_s[of]
        rate = self._prefill_rate[of] + (self._sent_tokens[of] + self._prompt[of]) / _PACE
        return float(self._paced(of, running, _ZERO, rate, self._full_s[of] + context_s * running, context_s)[0][0])

    def _paced(
        self,
        of: slice,
        running: FloatArray,
        rest: FloatArray,
        prefill_rate: FloatArray,
        full_s: FloatArray,
        context_s: FloatArray,
    ) -> tuple[FloatArray, FloatArray]:
        """Return the seconds of the mean step, in which prompts may run beside decodes, and of a step of `rest` tokens.

        The second is the step that computes the last `rest` tokens of a prompt: where kernels for many rows begin, few
        tokens take as long as many.

        A step contains prompts if any came while the previous one ran, or were left over, which is more frequent the
        larger the share of its capacity that comes. With more than one prompt at a time, each token beyond the first
        prompt's takes as long as in a full step. The share of steps with prompts is the one at which it stays constant.

        prefill_rate  prompt tokens that come per second
        full_s        seconds of a full step
        context_s     seconds that each sequence's context adds to a step
        """
        left = self._chunk[of] - running
        tokens = np.minimum(self._prompt[of], np.maximum(left, _ONE))
        rows = np.empty((3, len(running)))
        rows[0] = running
        np.add(running, tokens, out=rows[1])
        np.add(running - _ONE, rest, out=rows[2])  # without the request itself, which decodes later
        alone_s, with_s, rest_s = steps_s = self._step_s(of, rows) + context_s * running
        token_s = np.maximum(full_s - with_s, _ZERO) / np.maximum(left - tokens, _ONE)
        none_alone, none_with = np.exp(steps_s[:2] * (prefill_rate / -tokens))
        used = np.minimum(prefill_rate * full_s / np.maximum(left, _ONE), _ONE)
        none_with *= _ONE - used * used
        share = (_ONE - none_alone) / (_ONE - none_alone + none_with)
        paced = alone_s + share * (with_s - alone_s - token_s * tokens)
        paced /= np.maximum(_ONE - token_s * prefill_rate, _LITTLE)
        seconds: FloatArray = np.maximum(np.minimum(paced, full_s), alone_s)
        return seconds, np.where(rest > 0, rest_s, _ZERO)

    def _step_s(self, of: slice, rows: FloatArray) -> FloatArray:
        """Return the seconds of steps with that many tokens, without the cost of contexts: [any, replicas].

        Up to the largest measured batch the times are those of decodes; above it, those of prompts.

        rows  tokens of the step, at least one
        """
        starts, rises = self._steps.take(_ENDS.searchsorted(rows) + self._first_pieces[of], axis=1)
        seconds: FloatArray = starts + rises * rows
        return seconds

    def copy_corrections(self, replica: int, others: Iterable[int]) -> None:
        """Copy the corrections of one replica to others of its kind, as their first guess."""
        for other in others:
            self._ttft_off[other] = self._ttft_off[replica]
            self._tpot_off[other] = self._tpot_off[replica]

    def carried(self, replica: int) -> float:
        """Return the sequences on a replica: those of its latest load, and those sent since."""
        return float(self._sequences[replica] + self._sent[replica])

    def own_share(self) -> float:
        """Return the share of all sequences in the fleet that this ingress has sent; 1 if there are none."""
        there = float((self._sequences + self._sent)[self._usable].sum())
        return float(self._carried[self._usable].sum()) / there if there > 0 else 1.0

    def off(self, replica: int) -> tuple[float, float]:
        """Return the corrections of the time to first token and of the time per token: observed over predicted."""
        return float(self._ttft_off[replica]), float(self._tpot_off[replica])

    def set_usable(self, replica: int, *, usable: bool) -> None:
        """Set whether a replica may be chosen: one that drains, is unhealthy or cannot serve the model may not."""
        self._usable[replica] = usable
        self._barred[replica] = 0.0 if usable else math.inf


def _put_last(strain: FloatArray, numerics: FloatArray, query: RoutingQuery) -> None:
    """Add strain to replicas that rank behind: of another numerics class, of other weights, and those of `last`."""
    if query.numerics is not None:
        strain[numerics != query.numerics] += OTHERS
    for replica in query.others:
        strain[replica] += 2 * OTHERS
    for replica in query.last:
        strain[replica] += LAST
    if (lowest := strain.min(initial=math.inf)) >= OTHERS and lowest < math.inf:
        strain -= lowest // OTHERS * OTHERS  # else it would hide the differences among the best that are left


def _towards(factor: float, right: float, share: float, max_factor: float) -> float:
    """Move a factor by `share` of the way to the right one on a logarithmic scale, within [1 / max_factor, max_factor].

    One step counts a distance of a factor of e at most.
    """
    if right <= 0:
        return factor
    step = share * max(-1.0, min(1.0, math.log(right / factor)))
    return min(max(factor * math.exp(step), 1 / max_factor), max_factor)


def _followed(margin: float, weight: float, *, missed: bool) -> float:
    """Return a margin, stricter after a miss and else looser, so that in the long run `_MISSES` of requests miss."""
    step = -(1 - _MISSES) if missed else _MISSES
    return min(max(margin * math.exp(_LEARNED * weight * step), _MARGINS[0]), _MARGINS[1])
