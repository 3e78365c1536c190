"""Comparison of what a request took with what was predicted for it, term by term. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..prediction.routing_query import LatencyPrediction
from .route_record import RouteAttempt, RouteRecord

__all__ = ["TERMS", "LatencyTerm", "first_answer", "latency_terms"]

TERMS = (
    "held",  # at the ingress, until a replica took it
    "retries",  # attempts of which nothing came
    "moves",  # after a replica had been lost: until the answer went on elsewhere
    "network",  # way to the replica and back
    "queue",  # in the replica's queue
    "fetch",  # for KV from the prefix store
    "prefill",  # until the prompt was computed
    "first_token",  # until the first token, where the replica does not say what it was spent on, or it has not come
    "decode",  # tokens after the first
    "client",  # until the client had read what had come
    "silence",  # after the last token, until the end
)

RESOLUTION_S = 1e-6  # shorter times are nothing but rounding


@dataclass(frozen=True, slots=True)
class LatencyTerm:
    """One part of what a request took, in seconds, with its prediction. All terms add up to the whole time."""

    name: str
    predicted_s: float
    actual_s: float

    @property
    def excess_s(self) -> float:
        return self.actual_s - self.predicted_s


def first_answer(record: RouteRecord) -> RouteAttempt | None:
    """Return the attempt that brought the first token, or else the latest; None if the request was never placed."""
    came = (one for one in record.attempts if one.first_s)
    return next(came, record.attempts[-1] if record.attempts else None)


def latency_terms(record: RouteRecord, now: float) -> list[LatencyTerm]:
    """Return the terms that are not about 0. `now`: end of what is measured while the request runs."""
    end, actual, predicted = record.ended_s or now, dict.fromkeys(TERMS, 0.0), dict.fromkeys(TERMS, 0.0)
    main, attempts = first_answer(record), record.attempts
    actual["held"] = (attempts[0].placed_s if attempts else end) - record.began_s
    for number, attempt in enumerate(attempts):
        began_s = attempt.placed_s
        if attempt is main:
            began_s = max(attempt.sent_s, attempt.placed_s)
            actual["held"] += began_s - attempt.placed_s
        last = number + 1 == len(attempts)
        until = end if last else attempts[number + 1].placed_s
        waited = "moves" if attempt.tokens_before else "retries"
        whole = attempt.first_s == attempt.last_s and record.output_tokens > record.choices
        if attempt.first_s:
            first_s = attempt.first_s - began_s
            if attempt is main:
                _add_first_token(actual, attempt, first_s, "decode" if whole else "network")
            else:
                actual[waited] += first_s
            read_s = min(attempt.reader_s, until - attempt.first_s)
            decode_s = max(0.0, attempt.last_s - attempt.first_s - read_s)
            actual["client"] += read_s
            actual["decode"] += decode_s
            actual["silence" if last else "moves"] += until - attempt.first_s - read_s - decode_s
        elif not last or attempt.error not in ("", "deadline_exceeded"):
            actual[waited] += until - began_s
        elif record.outcome == "answered":  # in one message
            _add_first_token(actual, attempt, until - began_s, "decode" if whole else "network")
        else:
            actual["first_token" if attempt.replica else "held"] += until - began_s
    if main is not None and (expected := main.predictions.get(main.replica)) is not None:
        _add_predicted(predicted, actual, expected, record)
    terms = (LatencyTerm(name, predicted[name], actual[name]) for name in TERMS)
    return [one for one in terms if max(one.predicted_s, abs(one.actual_s)) > RESOLUTION_S]


def _add_first_token(actual: dict[str, float], attempt: RouteAttempt, seconds: float, rest: str) -> None:
    """Add the seconds until the first message, and to `rest` those that the replica says nothing of.

    In an answer of one message, decoding cannot be told from the way back.
    """
    if attempt.timings is None:
        actual["first_token"] += seconds
        return
    for name, spent_s in zip(("queue", "fetch", "prefill"), attempt.timings, strict=True):
        actual[name] += spent_s
    actual[rest] += seconds - sum(attempt.timings)


def _add_predicted(
    predicted: dict[str, float], actual: dict[str, float], expected: LatencyPrediction, record: RouteRecord
) -> None:
    if actual["first_token"]:
        predicted["first_token"] = expected.ttft_s
    elif actual["prefill"]:
        predicted["queue"], predicted["fetch"] = expected.queue_s, expected.fetch_s
        predicted["prefill"] = expected.ttft_s - expected.queue_s - expected.fetch_s
    if record.output_tokens > record.choices:
        seconds = expected.tpot_s * (record.output_tokens / record.choices - 1)
        predicted["decode" if actual["decode"] else "first_token"] += seconds
