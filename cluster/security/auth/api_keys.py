"""API keys: 256 random bits each, stored as SHA-256; a call is compared with every key, in constant time."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from ...service_errors import ConfigurationError

PREFIX = "mk-"  # lets scanners for leaked secrets recognize keys
OWN_TENANT = "_motley"  # no name that a key file may hold
MAX_KEYS = 10_000  # each call is compared with all keys, 0.1 ms for a thousand
MAX_KEY_CHARS = 512  # longer values of clients are not accepted as keys
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# "admin": the control plane, and the metrics; "metrics": reading metrics, over HTTP or of the fleet, also as KEDA.
Scope = Literal["", "admin", "metrics"]
LAST = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()  # latest time that can be written
ID_CHARS = 12  # characters of a hash that identify a key without revealing it


@dataclass(frozen=True, slots=True)
class StoredKey:
    """Stored form of one key.

    tenant   tenant or admin who has it
    sha256   SHA-256 of the key in hex
    expires  end of its validity in Unix seconds; None: never
    scope    what it gives access to, and to nothing else; empty: the service, as its tenant
    """

    tenant: str
    sha256: str
    expires: float | None = None
    scope: Scope = ""

    def __post_init__(self) -> None:
        if not _SHA256.fullmatch(self.sha256):
            raise ConfigurationError(
                f"tenants.{self.tenant}: {self.sha256[:16]!r} is no SHA-256; expected 64 lower-case hex digits, and "
                "never the key itself",
                param="api_keys",
                code="bad_key_file",
            )

    @property
    def id(self) -> str:
        """Identifier of the key, which does not reveal it."""
        return self.sha256[:ID_CHARS]


def check_tenant(name: str) -> str:
    """Return a tenant's name.

    Raises ConfigurationError unless it has 1 to 64 letters, digits, `.`, `_` and `-`, and a letter or digit first.
    """
    if not _TENANT.fullmatch(name):
        raise ConfigurationError(
            f"tenant {name[:80]!r}: expected 1 to 64 letters, digits, dots, dashes or underscores, a letter or digit "
            "first",
            param="tenant",
            code="bad_tenant",
        )
    return name


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """Return the SHA-256 of a key in hex. A slow hash would add nothing, since nobody guesses 256 random bits."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class KeyRing:
    """All keys of a service. Raises ConfigurationError for a key that two tenants share."""

    def __init__(self, keys: Iterable[StoredKey]) -> None:
        self.keys = tuple(keys)
        if len(self.keys) > MAX_KEYS:
            raise ConfigurationError(f"{len(self.keys)} keys; at most {MAX_KEYS}", code="bad_key_file")
        seen: dict[str, str] = {}
        for key in self.keys:
            if key.sha256 in seen:
                raise ConfigurationError(
                    f"tenants.{key.tenant}: key {key.id} is there twice, also for {seen[key.sha256]}",
                    param="api_keys",
                    code="bad_key_file",
                )
            seen[key.sha256] = key.tenant

    def tenant_of(self, key: str, now: float | None = None) -> str | None:
        """Return the tenant whose key this is; None if it is unknown, expired or of another scope."""
        found = self._stored(key, now)
        return None if found is None or found.scope else found.tenant

    def admin_of(self, key: str, now: float | None = None) -> str | None:
        """Return the admin whose key this is; None if it is unknown, expired or of another scope."""
        return self._with_scope(key, now, "admin")

    def reader_of(self, key: str, now: float | None = None) -> str | None:
        """Return who may read metrics by this key, an admin too; None if it is unknown, expired or a tenant's."""
        return self._with_scope(key, now, "admin", "metrics")

    def _with_scope(self, key: str, now: float | None, *scopes: Scope) -> str | None:
        found = self._stored(key, now)
        return found.tenant if found is not None and found.scope in scopes else None

    def _stored(self, key: str, now: float | None) -> StoredKey | None:
        """Return the valid stored key that matches, in the same time whichever it is; None if there is none."""
        digest = hash_key(key[:MAX_KEY_CHARS]) if len(key) <= MAX_KEY_CHARS else ""
        now = time.time() if now is None else now
        found: StoredKey | None = None
        for stored in self.keys:
            same = hmac.compare_digest(stored.sha256, digest)
            if same and (stored.expires is None or now < stored.expires):
                found = stored
        return found


def read_expiry(value: object, where: str) -> float | None:
    """Return the Unix seconds of an ISO 8601 date or time.

    Without a zone it is in UTC; a date alone means its beginning. Raises ConfigurationError.
    """
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        raise ConfigurationError(
            f"{where}: {str(value)[:40]!r} is no time; expected one such as 2027-01-31T12:00:00Z",
            param="api_keys",
            code="bad_key_file",
        ) from None
    seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not 0 <= seconds <= LAST:
        raise ConfigurationError(
            f"{where}: {str(value)[:40]!r} is not accepted; expected a time from 1970 to 9999 in UTC",
            param="api_keys",
            code="bad_key_file",
        )
    return seconds


def write_expiry(expires: float) -> str:
    return datetime.fromtimestamp(expires, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
