"""Command `motley fleet`: shows a fleet and changes it, over the control plane of a running service."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .fleet_arguments import decision_reason, read_bounds, read_setting
from .numbers import DAY_S, MAX_REPLICAS, Between
from .options import Json

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from ..cluster.protos import control_pb2 as pb

app = typer.Typer(
    name="fleet",
    help="A running fleet: what it does, and how many replicas there are to be.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

KEY = "MOTLEY_ADMIN_KEY"
CALL_S = 30.0
OBJECTIVE = Between(0.0, 3600.0, above=True)
UPDATE_S = 1800.0  # seconds for replicas to read, check and build the weights

Address = Annotated[
    str | None,
    typer.Option(
        "--address", "--target", metavar="HOST:PORT", help="Address of the control plane; default: this machine's."
    ),
]
AdminKey = Annotated[
    Path | None, typer.Option(metavar="FILE", help=f"Holds an admin's key; default: ${KEY}, or this machine's own.")
]
Ca = Annotated[Path | None, typer.Option(metavar="PEM", help="Authority that signed the control plane's certificate.")]
Generation = Annotated[int | None, typer.Option(help="Act only if this is still the fleet's generation in status.")]
Reason = Annotated[str | None, typer.Option(help="Reason to keep with the decision; default: command and user.")]
Zero = Annotated[bool, typer.Option("--allow-zero", help="Allow that no replica is left.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until it is done.")]


@app.command()
def status(address: Address = None, admin_key: AdminKey = None, ca: Ca = None, as_json: Json = False) -> None:
    """Show pools, replicas, and recent decisions.

    \b
    Examples:
      motley fleet status
      motley fleet status --address 10.0.0.5:9190 --admin-key admin.key --ca ca.pem --json
    """
    from ..cluster.protos import control_pb2 as pb
    from . import fleet_view

    with _plane(address, admin_key, ca) as plane:
        fleet = plane.GetFleet(pb.GetFleetRequest())
    if as_json:
        return _print(fleet)
    fleet_view.show_fleet(fleet)


@app.command()
def prefixes(
    flush: Annotated[bool, typer.Option("--flush", help="First drop all cached prefixes, or one tenant's.")] = False,
    tenant: Annotated[str | None, typer.Option(help="Tenant whose prefixes are dropped.")] = None,
    address: Address = None,
    admin_key: AdminKey = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Show how many tokens of prompts replicas find as cached prefixes: in their own KV, and in the shared store.

    \b
    Examples:
      motley fleet prefixes
      motley fleet prefixes --flush --tenant alice
    """
    from ..cluster.protos import control_pb2 as pb
    from . import fleet_prefixes

    if tenant is not None and not flush:
        raise typer.BadParameter("--tenant: it is accepted with --flush only, and says whose prefixes are forgotten")
    with _plane(address, admin_key, ca) as plane:
        if flush:
            forgot = plane.FlushPrefixes(pb.FlushPrefixesRequest(tenant=tenant))
            typer.echo(f"{forgot.replicas} replicas have let go of them", err=as_json)
        found = plane.GetPrefixes(pb.GetPrefixesRequest())
    if as_json:
        return _print(found)
    fleet_prefixes.show_prefixes(found)


@app.command()
def explain(
    request: Annotated[str, typer.Argument(help="A request's id: the server's, or the client's own.")],
    address: Address = None,
    admin_key: AdminKey = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Show why a request went to its replica, and what made it slow.

    Each ingress knows its last 10,000 requests, those that were refused or failed too.

    \b
    Examples:
      motley fleet explain chatcmpl-5d41402abc4b2a76b9719d911017c592
      motley fleet explain my-request-7 --json
    """
    from ..cluster.protos import control_pb2 as pb
    from . import fleet_explain

    with _plane(address, admin_key, ca) as plane:
        found = plane.ExplainRoute(pb.ExplainRouteRequest(request=request))
    if as_json:
        return _print(found)
    fleet_explain.show_routes(found)


@app.command()
def watch(address: Address = None, admin_key: AdminKey = None, ca: Ca = None, as_json: Json = False) -> None:
    """Show the fleet as it changes, until Ctrl-C.

    \b
    Examples:
      motley fleet watch
      motley fleet watch --json          a line for each change
    """
    from . import fleet_view

    with _plane(address, admin_key, ca) as plane:
        updates = plane.updates()
        if as_json:
            for update in updates:
                _print(update, line=True)
        else:
            fleet_view.show_live_fleet(updates)


@app.command()
def scale(
    pool: Annotated[str, typer.Argument(help="A pool's name, as status shows it.")],
    replicas: Annotated[int, typer.Argument(help="Replicas that the pool is to have.", min=0, max=MAX_REPLICAS)],
    reason: Reason = None,
    generation: Generation = None,
    allow_zero: Zero = False,
    wait: Wait = False,
    address: Address = None,
    admin_key: AdminKey = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Change a pool's number of replicas. Replicas that are removed finish their requests first.

    \b
    Examples:
      motley fleet scale cpu 3 --reason "the afternoon" --wait
      motley fleet scale cpu 0 --allow-zero
    """
    from ..cluster.protos import control_pb2 as pb

    with _plane(address, admin_key, ca) as plane:
        made = plane.ScalePool(
            pb.ScalePoolRequest(
                pool=pool,
                replicas=replicas,
                generation=generation,
                reason=decision_reason(reason, "scale"),
                allow_zero=allow_zero,
            )
        )
        _print_decision(made, as_json)
        if wait:
            _wait(plane, made, "settled", pool=pool, replicas=replicas)


@app.command()
def policy(
    name: Annotated[str, typer.Argument(help="fixed, queue or slo; with none the one there is, or other bounds.")] = "",
    bounds: Annotated[
        list[str] | None, typer.Option(metavar="POOL=MIN:MAX", help="Replicas that a pool may have; repeatable.")
    ] = None,
    ttft_s: Annotated[float | None, typer.Option(help="Objective: seconds to the first token."), OBJECTIVE] = None,
    tpot_s: Annotated[float | None, typer.Option(help="Objective: seconds for each token after it."), OBJECTIVE] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=NUMBER", help="A setting of the policy; repeatable.")
    ] = None,
    reason: Reason = None,
    generation: Generation = None,
    address: Address = None,
    admin_key: AdminKey = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Show or set the policy that decides how many replicas there are, and its bounds.

    \b
    Examples:
      motley fleet policy
      motley fleet policy queue --bounds cpu=1:4
      motley fleet policy slo --ttft-s 2 --tpot-s 0.05
    """
    from ..cluster.protos import control_pb2 as pb

    given = [read_bounds(one) for one in bounds or ()]
    settings = dict(read_setting(one) for one in setting or ())
    with _plane(address, admin_key, ca) as plane:
        if not (name or bounds or setting or ttft_s is not None or tpot_s is not None):
            fleet = plane.GetFleet(pb.GetFleetRequest())
            found = {one.name: [one.minimum, one.maximum] for one in fleet.pools}
            if as_json:
                return typer.echo(json.dumps({"policy": fleet.policy, "bounds": found}))
            typer.echo(fleet.policy)
            for pool, (minimum, maximum) in found.items():
                typer.echo(f"{pool:<24}{minimum} to {maximum}")
            return None
        request = pb.SetScalingPolicyRequest(
            policy=name,
            bounds=given,
            generation=generation,
            reason=decision_reason(reason, "policy"),
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            settings=settings,
        )
        return _print_decision(plane.SetScalingPolicy(request), as_json)


@app.command()
def drain(
    replica: Annotated[str, typer.Argument(help="A replica's name, as status shows it.")],
    remove: Annotated[bool, typer.Option("--remove", help="Do not replace it.")] = False,
    timeout_s: Annotated[
        float | None, typer.Option(help="Seconds until its streams move to others; default: 600.", min=0.0, max=DAY_S)
    ] = None,
    reason: Reason = None,
    generation: Generation = None,
    allow_zero: Zero = False,
    wait: Wait = False,
    address: Address = None,
    admin_key: AdminKey = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Let a replica take no new requests, and replace it when its last one has ended. Run again to add --remove or
    change the time.

    \b
    Examples:
      motley fleet drain 3k2j5h1a --wait
      motley fleet drain 3k2j5h1a --remove --reason "its fan is loud"
    """
    from ..cluster.protos import control_pb2 as pb

    with _plane(address, admin_key, ca) as plane:
        request = pb.DrainReplicaRequest(
            replica_id=replica,
            remove=remove,
            timeout_s=timeout_s,
            generation=generation,
            reason=decision_reason(reason, "drain"),
            allow_zero=allow_zero,
        )
        made = plane.DrainReplica(request)
        _print_decision(made, as_json)
        if wait:
            _wait(plane, made, "drained", replica_id=replica)


@app.command()
def roll(
    pool: Annotated[str, typer.Argument(help="A pool's name, as status shows it.")],
    model: Annotated[str, typer.Argument(help="Another checkpoint with the same tokenizer; default: the same.")] = "",
    reason: Reason = None,
    generation: Generation = None,
    wait: Wait = False,
    address: Address = None,
    admin_key: AdminKey = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Replace the replicas of a pool while the others serve.

    \b
    Examples:
      motley fleet roll cpu --wait
      motley fleet roll cpu ./the-same-model-int4
    """
    from ..cluster.protos import control_pb2 as pb

    with _plane(address, admin_key, ca) as plane:
        made = plane.RollModel(
            pb.RollModelRequest(pool=pool, model=model, generation=generation, reason=decision_reason(reason, "roll"))
        )
        _print_decision(made, as_json)
        if wait:
            _wait(plane, made, "rolled", "roll_failed", pool=pool)


@app.command()
def update(
    file: Annotated[Path, typer.Argument(help="A safetensors file, the same on every host of the pool's replicas.")],
    delta: Annotated[bool, typer.Option("--delta", help="Add its tensors to the present weights.")] = False,
    expect_version: Annotated[
        int | None,
        typer.Option(help="Only if the pool's weights are still of this version, as status shows it; 0: of no update."),
    ] = None,
    pool: Annotated[str, typer.Option(help="A pool's name; default: the only one.")] = "",
    reason: Reason = None,
    address: Address = None,
    admin_key: AdminKey = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Give a pool other weights while it serves. Requests that have begun end with the weights they began with.

    \b
    Examples:
      motley fleet update /srv/weights/step-100.safetensors
      motley fleet update /srv/weights/step-101.safetensors --delta --expect-version 1
    """
    from ..cluster.protos import control_pb2 as pb

    request = pb.UpdateWeightsRequest(
        path=str(file.absolute()),
        delta=delta,
        expected_version=expect_version,
        pool=pool,
        reason=decision_reason(reason, "update"),
    )
    with _plane(address, admin_key, ca, UPDATE_S) as plane:
        made = plane.UpdateWeights(request)
    if as_json:
        _print(made)
    else:
        typer.echo(f"{made.pool}: weights of version {made.weights_version}, {made.contents[:16]}")
        for one in made.replicas:
            typer.echo(f"{one.replica_id:<24}version {one.weights_version}{f': {one.error}' if one.error else ''}")
    if any(one.error for one in made.replicas):
        raise typer.Exit(1)


@app.command()
def metrics(
    pool: Annotated[str, typer.Argument(help="A pool's name; default: all.")] = "",
    address: Address = None,
    admin_key: AdminKey = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Show counts and rates of pools, and of requests to the fleet.

    \b
    Examples:
      motley fleet metrics
      motley fleet metrics cpu --json
    """
    from ..cluster.protos import control_pb2 as pb
    from . import fleet_view

    with _plane(address, admin_key, ca) as plane:
        found = plane.GetMetrics(pb.GetMetricsRequest(pool=pool))
    if as_json:
        return _print(found)
    fleet_view.show_metrics(found)


@contextmanager
def _plane(address: str | None, admin_key: Path | None, ca: Path | None, timeout_s: float = CALL_S) -> Iterator[Any]:
    """Yield a stub whose calls carry the key and have a timeout. Errors are printed in one line."""
    import grpc

    from ..replicas.errors import InvalidRequest, MotleyError
    from .fleet_calls import ControlPlaneClient, resolve_contact

    contact = resolve_contact(address, _key(admin_key), ca)
    try:
        with ControlPlaneClient(contact, ca, timeout_s) as calls:
            yield calls
    except grpc.RpcError as error:
        code, message = error.code(), error.details() or error.code().name
        wrong = code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        if code == grpc.StatusCode.UNAVAILABLE and "connect" in message.lower():
            message = f"nothing answers at {contact.address}"
        raise (InvalidRequest if wrong else MotleyError)(message, code=code.name.lower()) from None


def _key(path: Path | None) -> str:
    if path is None:
        return os.environ.get(KEY, "").strip()
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--admin-key {path} cannot be read: {error}") from error


def _print_decision(made: pb.Decision, as_json: bool) -> None:
    from . import fleet_view

    if as_json:
        return _print(made)
    what = fleet_view.event_sentence(made.event) if made.HasField("event") else "it was so already"
    typer.echo(f"{what}; generation {made.generation}")


def _wait(plane: Any, made: pb.Decision, *kinds: str, pool: str = "", replica_id: str = "", replicas: int = -1) -> None:
    """Wait until an event of this kind after the decision; print meanwhile what delays it."""
    from ..replicas.errors import MotleyError
    from . import fleet_view

    if not made.HasField("event"):
        return
    for update in plane.updates(made.event.sequence):
        for event in update.events:
            if (event.pool != pool and pool) or (event.replica_id != replica_id and replica_id):
                continue
            typer.echo(fleet_view.event_sentence(event), err=True)
            kind = fleet_view.event_kind(event)
            if kind == "roll_failed":
                raise MotleyError(f"pool {pool}: {event.reason}")
            if kind in kinds and replicas in (-1, event.after):
                return


def _print(message: Message, *, line: bool = False) -> None:
    from google.protobuf.json_format import MessageToDict

    found = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    typer.echo(json.dumps(found, indent=None if line else 1))
