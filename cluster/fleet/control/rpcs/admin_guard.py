"""Access control of the control plane: a call needs an admin's key, or for metrics one that may read them.

The control plane has a key of its own, for a service without other admins.
"""

from __future__ import annotations

from typing import Protocol

from ....security.auth.call_guard import CallerKeys, Headers, credentials, find_reader
from ....service_errors import Forbidden, Unauthenticated


class AdminKeys(CallerKeys, Protocol):
    def admin_of(self, key: str) -> str | None: ...


class AdminGuard:
    """Guard like `CallGuard`, but for admins.

    open_health  health checks need no key
    later        a call without any key passes as nobody's, since its handler looks for a key in the request
    """

    def __init__(self, keys: AdminKeys, *, open_health: bool = False, later: bool = False) -> None:
        self._keys = keys
        self._open_health = open_health
        self._later = later

    def tenant(self, peer: str, headers: Headers, *, host: str | None = None, health: bool = False) -> str:
        """Return the name of the calling admin. Raises Unauthenticated, or Forbidden for a key of another scope."""
        given = credentials(headers)
        key = given.pop() if len(given) == 1 else ""
        found = self._keys.admin_of(key)
        if found is not None:
            return found
        if health and self._open_health:
            return ""
        if self._keys.tenant_of(key) is not None or self._keys.reader_of(key) is not None:
            kind = "is a tenant's key" if self._keys.tenant_of(key) is not None else "is a key for metrics"
            raise Forbidden(f"this {kind}; an admin's is needed here: motley keys new NAME --admin", code="not_admin")
        raise Unauthenticated(
            "a valid API key of an admin is required: Authorization: Bearer KEY, or x-api-key: KEY",
            code="invalid_api_key",
        )

    def reader(self, headers: Headers) -> str:
        """Return who reads metrics, an admin too. Raises Unauthenticated, or Forbidden for a tenant's key."""
        given = credentials(headers)
        if not given and self._later:
            return ""
        return self.reader_with(given)

    def reader_with(self, given: set[str]) -> str:
        """Return who reads metrics with these keys, as `reader` does; more than one is as bad as none."""
        return find_reader(self._keys, next(iter(given)) if len(given) == 1 else "")
