"""Sentences that say why a request went where it did, and what made it take longer than predicted. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..prediction.routing_query import LatencyPrediction
from .latency_terms import LatencyTerm, first_answer
from .route_record import RouteAttempt, RouteRecord

__all__ = ["cached_tokens", "cause_sentence", "choice_sentence"]

SMALL_S, SMALL_SHARE = 0.01, 0.1  # an excess below either of both is no cause
_REFUSALS = {  # of requests that were never placed
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
    cached = f"with {cached_tokens(record, attempt, expected)} of {record.prompt_tokens} prompt tokens cached"
    times = f"predicted to begin in {_time(expected.ttft_s)}, then {_time(expected.tpot_s)} a token"
    sentences = [f"It went to {chosen}, {times}, {cached}."]
    if attempt.ranked[0] != chosen:
        sentences.append(f"{attempt.ranked[0]} was better, but did not take it.")
    if (other := next((name for name in predictions if name != chosen), None)) is None:
        sentences.append("No other replica could take it.")
    else:
        sentences.append(f"{other} would have begun in {_time(predictions[other].ttft_s)}{_queue(predictions[other])}.")
    sentences += [f"{count} of {attempt.num_replicas} left behind: {reason}." for reason, count, _ in attempt.excluded]
    return " ".join(sentences)


def cause_sentence(record: RouteRecord, terms: Sequence[LatencyTerm]) -> tuple[str, str]:
    """Return the name of the term that exceeds its prediction most, empty if none does by much, and a sentence on it.

    A request that failed is told to have done so first.
    """
    term = max(terms, key=lambda one: one.excess_s, default=LatencyTerm("held", 0.0, 0.0))
    attempt, outcome = first_answer(record), record.outcome
    if attempt is None:
        refused = _REFUSALS.get(outcome, f"It ended with {outcome} before it was placed.")
        return "held", refused if outcome else f"{_explain(record, None, term)}."
    failed = f"It ended with {outcome}. " if outcome not in ("", "answered", "cancelled") else ""
    if term.excess_s >= max(SMALL_S, SMALL_SHARE * sum(one.predicted_s for one in terms)):
        return term.name, f"{failed}{_explain(record, attempt, term)}."
    return "", f"{failed}{_failures(record)}." if failed else "It took about as long as predicted."


def _explain(record: RouteRecord, attempt: RouteAttempt | None, term: LatencyTerm) -> str:
    replica, taken = "" if attempt is None else attempt.replica, _time(term.actual_s)
    both = f"{taken} ({_time(term.predicted_s)} predicted)"
    match term.name:
        case "held":
            came_late = not record.num_replicas or (attempt is not None and not attempt.num_replicas)
            why = "there was no replica when it came" if came_late else "no replica had room for it"
            return f"It waited {taken} at the ingress: {why}"
        case "retries":
            return f"{taken} went to attempts of which nothing came: {_failures(record)}"
        case "moves":
            return f"{taken} passed until the answer went on on another replica: {_failures(record)}"
        case "network":
            return f"The way to {replica} and back took {taken}"
        case "queue":
            return f"It waited {both} in the queue of {replica}"
        case "fetch":
            return f"{replica} waited {both} for the prefix store"
        case "prefill":
            return f"Its prompt took {both} to compute on {replica}{_missing_prefix(record, attempt)}"
        case "first_token":
            came = attempt is not None and (attempt.first_s or record.outcome == "answered")
            return (
                f"{replica} took {both} until the first token" if came else f"No token came from {replica} for {both}"
            )
        case "decode":
            times = "once" if record.preemptions == 1 else f"{record.preemptions} times"
            lost = f": it was preempted {times}" if record.preemptions else ""
            return f"Its tokens after the first took {both} on {replica}{lost}"
        case "client":
            return f"Its client took {taken} to read what had come"
    return f"Nothing came for {taken} after the last token"


def _failures(record: RouteRecord) -> str:
    return ", ".join([f"{one.replica or 'no replica'} ({one.error})" for one in record.attempts if one.error])


def _missing_prefix(record: RouteRecord, attempt: RouteAttempt | None) -> str:
    if attempt is None or (expected := attempt.predictions.get(attempt.replica)) is None:
        return ""
    cached = cached_tokens(record, attempt, expected)
    if not 0 <= attempt.cached_tokens < cached:
        return ""
    return f": of {cached} prompt tokens that were expected in its cache, {attempt.cached_tokens} were there"


def cached_tokens(record: RouteRecord, attempt: RouteAttempt, expected: LatencyPrediction) -> int:
    """Return the tokens of the prompt, and of the output so far, that a replica was expected not to compute."""
    return max(0, record.prompt_tokens + attempt.tokens_before - round(expected.computed))


def _queue(expected: LatencyPrediction) -> str:
    return f", {_time(expected.queue_s)} of them in its queue" if expected.queue_s >= expected.ttft_s / 2 else ""


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
