"""Explanations of routes, made of their records when somebody asks: plain data, which travels to the control plane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..prediction.routing_candidates import LAST, OTHERS
from .latency_terms import LatencyTerm, first_answer, latency_terms
from .route_record import RouteAttempt, RouteRecord
from .route_words import cached_tokens, cause_sentence, choice_sentence

__all__ = ["MAX_EXPLAINED", "ExplainedRoute", "FoundRoutes", "explain_route", "explain_routes", "join_routes"]

MAX_EXPLAINED = 100  # routes in one answer, which must fit into one message


@dataclass(frozen=True, slots=True)
class ExplainedCandidate:
    """One replica that was compared. Times are predictions in seconds; the fields are as in `LatencyPrediction`.

    cached_tokens  tokens of the prompt, and of the output so far, that it would not compute
    behind         why it ranked behind others; empty: by its prediction alone
    """

    replica_id: str
    pool: str
    ttft_s: float
    tpot_s: float
    queue_s: float
    fetch_s: float
    strain: float
    cached_tokens: int
    behind: str


@dataclass(frozen=True, slots=True)
class ExcludedReplicas:
    """Replicas that were left out or put behind all others. `replica_ids`: the first of them."""

    reason: str
    replicas: int
    replica_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExplainedAttempt:
    """One attempt of a request.

    after_s        seconds from the request's arrival to the attempt
    replica_id     replica that it went to; empty: to none
    replicas       number of all replicas by then
    error          code of the error that ended it; empty: it brought the rest of the answer, or runs
    tokens_before  output tokens that the client had by then
    ttft_s         seconds from the attempt to its first token; None: none has come
    cached_tokens  prompt tokens that the replica did not compute; None: it has not said
    """

    after_s: float
    pool: str
    replica_id: str
    policy: str
    replicas: int
    candidates: tuple[ExplainedCandidate, ...]
    excluded: tuple[ExcludedReplicas, ...]
    error: str
    tokens_before: int
    ttft_s: float | None
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class ExplainedRoute:
    """Where one request went and why, and what made it slow.

    client_ids  ids that the client gave the request and its call
    age_s       seconds since it came
    outcome     as in `RouteRecord`, or "running"
    total_s     seconds from its arrival to its end, or until now
    left_out    attempts that are not told, since the record would have been too long
    choice      sentence: why it went where its first token came from
    slow_by     name of the term that exceeds its prediction most; empty: none does by much
    cause       sentence on that term, or why the request was refused
    """

    request_id: str
    call_id: str
    client_ids: tuple[str, ...]
    tenant: str
    ingress: str
    age_s: float
    outcome: str
    prompt_tokens: int
    output_tokens: int
    total_s: float
    ttft_s: float | None
    retries: int
    moves: int
    preemptions: int
    left_out: int
    attempts: tuple[ExplainedAttempt, ...]
    terms: tuple[LatencyTerm, ...]
    choice: str
    slow_by: str
    cause: str


@dataclass(frozen=True, slots=True)
class FoundRoutes:
    """Routes of one id, newest first. `matches`: how many there are, those that are left out included."""

    routes: tuple[ExplainedRoute, ...]
    matches: int


def explain_routes(records: Sequence[RouteRecord], now: float, pools: Mapping[str, str], ingress: str) -> FoundRoutes:
    found = tuple([explain_route(record, now, pools, ingress) for record in records[:MAX_EXPLAINED]])
    return FoundRoutes(found, len(records))


def join_routes(found: Sequence[FoundRoutes]) -> FoundRoutes:
    """Return what several ingresses have of one id together."""
    newest = sorted((one for each in found for one in each.routes), key=lambda one: one.age_s)
    return FoundRoutes(tuple(newest[:MAX_EXPLAINED]), sum(each.matches for each in found))


def explain_route(record: RouteRecord, now: float, pools: Mapping[str, str], ingress: str = "") -> ExplainedRoute:
    """Return the explanation of one request.

    now    current time in seconds of the record's clock
    pools  names of the pools by replica, as far as replicas are there still
    """
    record.observe()
    main, terms = first_answer(record), latency_terms(record, now)
    slow_by, cause = cause_sentence(record, terms)
    return ExplainedRoute(
        request_id=record.request_id,
        call_id=record.call_id,
        client_ids=tuple(name for name in (record.client_id, record.call_name) if name),
        tenant=record.tenant,
        ingress=ingress,
        age_s=now - record.began_s,
        outcome=record.outcome or "running",
        prompt_tokens=record.prompt_tokens,
        output_tokens=record.output_tokens,
        total_s=(record.ended_s or now) - record.began_s,
        ttft_s=main.first_s - record.began_s if main is not None and main.first_s else None,
        retries=max(0, record.num_attempts - 1 - record.num_moves),
        moves=record.num_moves,
        preemptions=record.preemptions,
        left_out=record.num_attempts - len(record.attempts),
        attempts=tuple([_explain_attempt(record, one, pools) for one in record.attempts]),
        terms=tuple(terms),
        choice=choice_sentence(record),
        slow_by=slow_by,
        cause=cause,
    )


def _explain_attempt(record: RouteRecord, attempt: RouteAttempt, pools: Mapping[str, str]) -> ExplainedAttempt:
    candidates = [
        ExplainedCandidate(
            name, pools.get(name, ""), one.ttft_s, one.tpot_s, one.queue_s, one.fetch_s, one.strain,
            cached_tokens(record, attempt, one), _behind(one.strain),
        )
        for name, one in attempt.predictions.items()
    ]  # fmt: skip
    return ExplainedAttempt(
        after_s=attempt.placed_s - record.began_s,
        pool=attempt.pool,
        replica_id=attempt.replica,
        policy=attempt.policy,
        replicas=attempt.num_replicas,
        candidates=tuple(candidates),
        excluded=tuple([ExcludedReplicas(*one) for one in attempt.excluded]),
        error=attempt.error,
        tokens_before=attempt.tokens_before,
        ttft_s=attempt.first_s - attempt.placed_s if attempt.first_s else None,
        cached_tokens=attempt.cached_tokens if attempt.cached_tokens >= 0 else None,
    )


def _behind(strain: float) -> str:
    """Return why a replica ranked behind others, from what was added to its strain."""
    if strain >= LAST:
        return "it failed lately, or its context may end the answer early"
    if strain >= 2 * OTHERS:
        return "it has other weights than the answer began with"
    return "it is of another numerics class than the answer began with" if strain >= OTHERS else ""
