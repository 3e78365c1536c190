"""Explanations of where requests went, on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ..cluster.protos import control_pb2 as pb
from .fleet_view import make_table


def show_routes(found: pb.ExplainedRoutes) -> None:
    """Print each route: what became of it, why it went there, what made it slow, and its attempts."""
    console = Console()
    for route in found.routes:
        console.print(Text(_head(route), style="bold"))
        for sentence in (route.choice, route.cause):
            if sentence:
                console.print(Text(sentence))
        if route.terms:
            console.print(_terms(route))
        for number, attempt in enumerate(route.attempts, 1):
            console.print(Text(_attempt(number, attempt)))
            for one in attempt.excluded:
                more = ", ..." if one.replicas > len(one.replica_ids) else ""
                console.print(Text(f"  {one.replicas} {one.reason}: {', '.join(one.replica_ids)}{more}"))
            if attempt.candidates:
                console.print(_candidates(attempt))
        if route.left_out:
            console.print(Text(f"{route.left_out} further attempts are not kept."))
        console.print()
    if found.matches > len(found.routes):
        console.print(Text(f"{found.matches - len(found.routes)} older requests of that id are not shown."))


def _head(route: pb.ExplainedRoute) -> str:
    counts = [(route.retries, "retries"), (route.moves, "moves"), (route.preemptions, "preemptions")]
    words = [f"{route.request_id}: {route.outcome} after {_seconds(route.total_s)}, {_seconds(route.age_s)} ago"]
    words += [f"{route.prompt_tokens} tokens of prompt, {route.output_tokens} of answer"]
    words += [f"{name}: {count}" for count, name in counts if count]
    return "; ".join(words)


def _terms(route: pb.ExplainedRoute) -> object:
    table = make_table("part", "predicted", "took")
    for term in route.terms:
        table.add_row(term.name, _seconds(term.predicted_s), _seconds(term.actual_s))
    return table


def _attempt(number: int, attempt: pb.RouteAttempt) -> str:
    words = (
        f"attempt {number}, after {_seconds(attempt.after_s)}: {attempt.replica_id or 'no replica'} of {attempt.pool}"
    )
    words += f", of {attempt.replicas} replicas, by {attempt.policy}"
    if attempt.tokens_before:
        words += f", to go on after {attempt.tokens_before} tokens"
    return f"{words}; ended by {attempt.error}" if attempt.error else words


def _candidates(attempt: pb.RouteAttempt) -> object:
    table = make_table("replica", "pool", "first token", "a token", "queue", "cached", "strain", "behind")
    for one in attempt.candidates:
        names = (Text(one.replica_id), Text(one.pool or "gone"))
        times = (_seconds(each) for each in (one.ttft_s, one.tpot_s, one.queue_s))
        strain = "" if one.behind else f"{one.strain:.3g}"
        table.add_row(*names, *times, f"{one.cached_tokens}", strain, one.behind)
    return table


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.3g} ms"
