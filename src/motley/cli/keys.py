"""Commands `motley keys`: make, list and revoke API keys. Keys are shown once; files hold their hashes."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Json

if TYPE_CHECKING:
    from ..cluster.security.auth.api_keys import Scope, StoredKey

app = typer.Typer(
    name="keys",
    help="API keys: who may call the service.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

DEFAULT = Path("motley-keys.yaml")
File = Annotated[Path, typer.Option("--file", metavar="FILE", help="YAML, or JSON if it is named so.")]


@app.command()
def new(
    tenant: Annotated[str, typer.Argument(help="Tenant: separates prefix caches and queues, and is in logs.")],
    file: File = DEFAULT,
    days: Annotated[
        float | None, typer.Option(help="Days of validity; default: until revoked.", min=0.01, max=36_500)
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="For `motley fleet` and metrics, and nothing else.")] = False,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="For reading metrics, also as KEDA, and nothing else.")
    ] = False,
) -> None:
    """Make a key, store its SHA-256 in the file, and print the key, which cannot be shown again.

    \b
    Examples:
      motley keys new alice --file keys.yaml
      motley keys new ci --file keys.yaml --days 90
      motley keys new operator --file keys.yaml --admin
      motley keys new prometheus --file keys.yaml --metrics
      motley keys new keda --file keys.yaml --metrics
    """
    from ..cluster.security.auth import api_keys
    from ..cluster.security.auth.key_file import edit_keys

    if admin and metrics:
        raise typer.BadParameter("--metrics: an admin's key reads metrics too; give one of the two")
    scope: Scope = "admin" if admin else "metrics" if metrics else ""
    expires = None if days is None else (datetime.now(UTC) + timedelta(days=days)).timestamp()
    key = api_keys.new_key()
    with edit_keys(file) as stored:
        stored.append(api_keys.StoredKey(api_keys.check_tenant(tenant), api_keys.hash_key(key), expires, scope))
    typer.echo(key)
    typer.echo(f"stored in {file} as {stored[-1].id}, for {tenant}, {_until(stored[-1])}", err=True)


@app.command("list")
def list_(file: File = DEFAULT, as_json: Json = False) -> None:
    """Show tenants and their keys, by the first digits of the hashes.

    \b
    Examples:
      motley keys list --file keys.yaml
    """
    from ..cluster.security.auth.api_keys import write_expiry
    from ..cluster.security.auth.key_file import read_keys

    stored = read_keys(file)
    rows = [
        {
            "tenant": key.tenant,
            "id": key.id,
            "expires": None if key.expires is None else write_expiry(key.expires),
            "admin": key.scope == "admin",
            "scope": key.scope or "tenant",
        }
        for key in stored
    ]
    if as_json:
        typer.echo(json.dumps({"keys": rows}))
        return
    for key in stored:
        typer.echo(f"{key.tenant:<24}{key.id:<16}{_until(key)}{f', {key.scope}' if key.scope else ''}")


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(help="A key, or its id as `list` shows it, or with --tenant a tenant.")],
    file: File = DEFAULT,
    tenant: Annotated[bool, typer.Option("--tenant", help="All keys of this tenant.")] = False,
) -> None:
    """Remove a key from the file. A running service notices within a second.

    \b
    Examples:
      motley keys revoke 3f5a90c1b2d4 --file keys.yaml
      motley keys revoke alice --tenant --file keys.yaml
    """
    from ..cluster.security.auth.api_keys import hash_key
    from ..cluster.security.auth.key_file import edit_keys

    with edit_keys(file) as stored:
        gone = [
            one for one in stored if (one.tenant == key if tenant else key == one.id or hash_key(key) == one.sha256)
        ]
        if not gone:
            raise typer.BadParameter(f"{file} holds no such {'tenant' if tenant else 'key'}")
        for one in gone:
            stored.remove(one)
    for one in gone:
        typer.echo(f"revoked {one.id} of {one.tenant}")


def _until(key: StoredKey) -> str:
    from ..cluster.security.auth.api_keys import write_expiry

    if key.expires is None:
        return "until revoked"
    return f"{'expired' if key.expires <= time.time() else 'until'} {write_expiry(key.expires)}"
