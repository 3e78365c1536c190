"""Views of a fleet on a terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from datetime import datetime

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..cluster.protos import control_pb2 as pb

LAST_EVENTS = 8
_WHAT = {
    "scaled": "{pool}: {before} to {after} replicas wanted",
    "settled": "{pool}: has its {after} replicas",
    "pending": "{pool}: waits for replicas",
    "policy": "another policy or other bounds",
    "draining": "{pool}: {replica_id} takes nothing new",
    "drained": "{pool}: {replica_id} has ended",
    "rolling": "{pool}: its replicas are being replaced",
    "rolled": "{pool}: its replicas have been replaced",
    "roll_failed": "{pool}: the new replicas did not start, those before serve on",
    "deployed": "other pools, bounds or policy were deployed",
    "policy_failed": "the policy does not decide",
    "updated": "{pool}: weights of version {after}",
}


def event_kind(event: pb.Event) -> str:
    return pb.EventKind.Name(event.kind).removeprefix("EVENT_KIND_").lower()


def event_sentence(event: pb.Event) -> str:
    said = _WHAT.get(event_kind(event), event_kind(event)).format(
        pool=event.pool, replica_id=event.replica_id, before=event.before, after=event.after
    )
    by = f" ({event.by})" if event.by else ""
    return f"{said}{by}{f': {event.reason}' if event.reason else ''}"


def show_fleet(fleet: pb.Fleet) -> None:
    Console().print(_whole(fleet, fleet.events))


def show_live_fleet(updates: Iterable[pb.FleetUpdate]) -> None:
    events: deque[pb.Event] = deque(maxlen=LAST_EVENTS)
    with Live(console=Console(), auto_refresh=False) as screen:
        for update in updates:
            events.extend(update.events)
            screen.update(_whole(update.fleet, events), refresh=True)


def show_metrics(found: pb.Metrics) -> None:
    table = make_table("pool", "target", "ready", "starting", "running", "waiting", "queued tokens", "KV", "tokens/s")
    for one in found.pools:
        counts = (one.target, one.ready, one.starting, one.running, one.waiting, one.queued_prefill_tokens)
        rates = (f"{one.kv_used:.0%}", f"{one.generated_tokens_per_s:.1f}")
        table.add_row(Text(one.pool), *map(str, counts), *rates)
    console = Console()
    console.print(table)
    console.print(
        f"{found.requests_per_s:.1f} requests/s, {found.prompt_tokens_per_s:.0f} prompt tokens/s, "
        f"{found.output_tokens_per_s:.0f} output tokens/s"
        if found.HasField("demand")
        else "no ingress tells what is asked of the fleet"
    )


def _whole(fleet: pb.Fleet, events: Iterable[pb.Event]) -> Group:
    return Group(
        Text(f"generation {fleet.generation}, policy {fleet.policy}{_fails(fleet)}{_demand(fleet)}\n"),
        _pools(fleet),
        Text(),
        _replicas(fleet),
        Text(),
        *(Text(_line(event)) for event in list(events)[-LAST_EVENTS:]),
    )


def _fails(fleet: pb.Fleet) -> str:
    return f", which fails: {fleet.policy_failed}" if fleet.policy_failed else ""


def _demand(fleet: pb.Fleet) -> str:
    if not fleet.HasField("demand"):
        return ""
    demand = fleet.demand
    return f"; {demand.requests} requests, {demand.refused} refused, {demand.late} late, {demand.held} held"


def _pools(fleet: pb.Fleet) -> Table:
    updated = _updated(fleet)
    heads = ("pool", "wanted", "ready", "starting", "draining", "bounds", *(["weights"] if updated else []))
    table = make_table(*heads, "waits for")
    for one in fleet.pools:
        counts = (one.target, one.ready, one.starting, one.draining)
        weights = [str(one.weights_version)] if updated else []
        cells = (*map(str, counts), f"{one.minimum}–{one.maximum}", *weights)
        waits = "; ".join(filter(None, ("is being rolled" if one.rolling else "", one.pending)))
        table.add_row(Text(one.name), *cells, Text(waits))
    return table


def _replicas(fleet: pb.Fleet) -> Table:
    updated = _updated(fleet)
    heads = ("replica", "pool", "state", "device", *(["weights"] if updated else []))
    table = make_table(*heads, "running", "waiting", "KV", "tokens/s", "node")
    for pool in fleet.pools:
        for one in pool.replicas:
            state = pb.ReplicaState.Name(one.state).removeprefix("REPLICA_STATE_").lower()
            load = (f"{one.running}", f"{one.waiting}", f"{one.kv_used:.0%}", f"{one.generated_tokens_per_s:.1f}")
            values = [*([str(one.weights_version)] if updated else []), *load]
            cells = values if one.load_age_s >= 0 else [""] * len(values)
            table.add_row(Text(one.replica_id), Text(pool.name), state, Text(one.device), *cells, one.node)
    return table


def _updated(fleet: pb.Fleet) -> bool:
    """Return whether weights were updated, as the column is left out otherwise: a terminal is narrow."""
    return any(pool.weights_version for pool in fleet.pools)


def make_table(*heads: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for head in heads:
        table.add_column(head, overflow="fold")
    return table


def _line(event: pb.Event) -> str:
    return f"{datetime.fromtimestamp(event.time):%H:%M:%S}  {event_sentence(event)}"
