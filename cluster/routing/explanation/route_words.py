"""Sentences that say why a request went where it did, and what made it take longer than predicted. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..prediction.routing_query import LatencyPrediction
from .latency_terms import LatencyTerm, first_answer
from .route_record import RouteAttempt, RouteRecord

__all__ = ["cause_sentence", "choice_sentence"]

SMALL_S, SMALL_SHARE = 0.01, 0.1  # an excess below either of both is no cause
_OUTCOMES = {  # of requests that were never placed
    "queue_full": "It was refused: no replica had room for it in time.",
    "deadline_unmeetable": "It was refused: no replica was predicted to begin before its deadline.",
    "deadline_exceeded": "Its deadline passed while it waited at the ingress.",
    "no_replica": "It was refused: no replica was there to take it.",
    "draining": "It was refused: the service was stopping.",
    "cancelled": "Its client left while it waited at the ingress.",
}


def choice_sentence(record: RouteRecord) -> str:
    """Return why the request went to the replica that brought its first token; empty if it was never placed."""
    if (attempt := first_answer(record)) is None:
        return ""
    predictions = attempt.predictions
    chosen = attempt.replica or next(iter(predictions), "")
    if not chosen:
        return "No replica could be compared: it was to go to any that took it."
    expected = predictions.get(chosen)
    if expected is None:
        return f"It went to {chosen}, for which nothing was predicted."
    sentences = [f"It went to {chosen}, predicted to begin in {_time(expected.ttft_s)}, {_parts(expected, record)}."]
    if attempt.ranked[0] != chosen:
        sentences.append(f"{attempt.ranked[0]} was better, but did not take it.")
    if (other := next((name for name in predictions if name != chosen), None)) is None:
        sentences.append("No other replica could take it.")
    else:
        sentences.append(f"{other} would have begun in {_time(predictions[other].ttft_s)}{_queue(predictions[other])}.")
    sentences += [f"{count} of {attempt.num_replicas} left behind: {reason}." for reason, count, _ in attempt.excluded]
    return " ".join(sentences)


def cause_sentence(record: RouteRecord, terms: Sequence[LatencyTerm]) -> tuple[str, str]:
    """Return the name of the term that exceeds its prediction most, and a sentence; the name is empty if none does."""
    total = sum(one.predicted_s for one in terms)
    term = max(terms, key=lambda one: one.excess_s, default=LatencyTerm("held", 0.0, 0.0))
    if not record.attempts:
        words = _OUTCOMES.get(record.outcome, f"It ended before it was placed: {record.outcome}.")
        return "held", f"{_held(record, term)}." if not record.outcome else words
    if term.excess_s < max(SMALL_S, SMALL_SHARE * total):
        return "", "It took about as long as predicted."
    attempt = first_answer(record)
    assert attempt is not None
    return term.name, f"{_WORDS[term.name](record, attempt, term)}."


def _held(record: RouteRecord, term: LatencyTerm) -> str:
    why = "no replica had room for it" if record.num_replicas else "there was no replica when it came"
    return f"It waited {_time(term.actual_s)} at the ingress: {why}"


def _failures(record: RouteRecord) -> str:
    failed = [f"{one.replica or 'no replica'} ({one.error})" for one in record.attempts if one.error]
    return ", ".join(failed)


def _prefill(record: RouteRecord, attempt: RouteAttempt, term: LatencyTerm) -> str:
    words = f"Its prompt took {_both(term)} to compute on {attempt.replica}"
    expected = attempt.predictions.get(attempt.replica)
    cached = 0 if expected is None else max(0, record.prompt_tokens - round(expected.computed))
    if 0 <= attempt.cached_tokens < cached:
        words += f": of {cached} prompt tokens that were expected in its cache, {attempt.cached_tokens} were there"
    return words


def _decode(record: RouteRecord, attempt: RouteAttempt, term: LatencyTerm) -> str:
    times = "once" if record.preemptions == 1 else f"{record.preemptions} times"
    lost = f": it was preempted {times}" if record.preemptions else ""
    return f"Its tokens after the first took {_both(term)} on {attempt.replica}{lost}"


_WORDS = {
    "held": lambda record, attempt, term: _held(record, term),
    "retries": lambda record, attempt, term: (
        f"{_time(term.actual_s)} went to attempts of which nothing came: {_failures(record)}"
    ),
    "moves": lambda record, attempt, term: (
        f"{_time(term.actual_s)} passed until the answer went on on another replica: {_failures(record)}"
    ),
    "network": lambda record, attempt, term: f"The way to {attempt.replica} and back took {_time(term.actual_s)}",
    "queue": lambda record, attempt, term: f"It waited {_both(term)} in the queue of {attempt.replica}",
    "fetch": lambda record, attempt, term: f"{attempt.replica} waited {_both(term)} for the prefix store",
    "prefill": _prefill,
    "first_token": lambda record, attempt, term: (
        f"{attempt.replica or 'No replica'} took {_both(term)} until the first token"
        if attempt.first_s or record.outcome == "answered"
        else f"No token had come from {attempt.replica or 'any replica'} after {_both(term)}"
    ),
    "decode": _decode,
    "client": lambda record, attempt, term: f"Its client took {_time(term.actual_s)} to read what had come",
    "silence": lambda record, attempt, term: f"Nothing came for {_time(term.actual_s)} after the last token",
}


def _parts(expected: LatencyPrediction, record: RouteRecord) -> str:
    cached = max(0, record.prompt_tokens - round(expected.computed))
    return f"then {_time(expected.tpot_s)} a token, with {cached} of {record.prompt_tokens} prompt tokens cached"


def _queue(expected: LatencyPrediction) -> str:
    return f", {_time(expected.queue_s)} of them in its queue" if expected.queue_s >= expected.ttft_s / 2 else ""


def _both(term: LatencyTerm) -> str:
    return f"{_time(term.actual_s)} ({_time(term.predicted_s)} predicted)"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
