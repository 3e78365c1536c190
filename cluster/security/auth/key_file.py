"""File of API keys: tenants and the hashes of their keys, as YAML or JSON.

    tenants:
      alice:
      - sha256: 64 hex digits
        expires: 2027-01-31T00:00:00Z    # optional
        scope: admin                     # optional: for the control plane, and nothing else; or metrics, to read those

Only its owner may be able to write to it, since whoever can could admit himself.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import yaml  # type: ignore[import-untyped, unused-ignore]

from ...service_errors import ConfigurationError
from .api_keys import KeyRing, Scope, StoredKey, check_tenant, read_expiry, write_expiry

log = logging.getLogger(__name__)

MAX_BYTES = 4 * 2**20
RELOAD_S = 1.0  # a change of the file takes effect within this time
_Stamp = tuple[int, int, int]


class KeyFile:
    """Keys of a file that may change while it is used. Raises ConfigurationError if it cannot be read at first.

    If the file later disappears or becomes invalid, that is only logged: the last keys stay valid.

    path  the file
    also  further keys that are valid besides
    """

    def __init__(self, path: Path, also: Iterable[StoredKey] = ()) -> None:
        self._path = path
        self._also = tuple(also)
        self._stamp = _stamp(path)
        self._ring = self._read()
        self._checked_s = time.monotonic()

    def tenant_of(self, key: str) -> str | None:
        return self._now().tenant_of(key)

    def admin_of(self, key: str) -> str | None:
        return self._now().admin_of(key)

    def reader_of(self, key: str) -> str | None:
        return self._now().reader_of(key)

    def _now(self) -> KeyRing:
        if time.monotonic() - self._checked_s >= RELOAD_S:
            self._reload()
        return self._ring

    def _reload(self) -> None:
        self._checked_s = time.monotonic()
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp  # so that a bad file is only logged once
        try:
            self._ring = self._read()
            log.info("API keys read again: %d", len(self._ring.keys) - len(self._also))
        except ConfigurationError as error:
            log.error("API keys stay as they were: %s", error.message)

    def _read(self) -> KeyRing:
        return KeyRing((*self._also, *read_keys(self._path)))


def read_keys(path: Path) -> tuple[StoredKey, ...]:
    """Return all keys of a file. Raises ConfigurationError naming the file and what is wrong with it."""
    try:
        return tuple(_parse(_text(path)))
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error.message}", param="api_keys", code=error.code) from None


@contextmanager
def edit_keys(path: Path) -> Iterator[list[StoredKey]]:
    """Provide a file's keys as a list to be changed, which is written back at the end unless an error is raised.

    A new file starts empty. Only one process edits at a time; others wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path.parent, os.O_RDONLY)  # lock the folder, since the file itself is replaced
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = list(read_keys(path)) if path.exists() else []
        yield keys
        write_keys(path, KeyRing(keys).keys)
    finally:
        os.close(lock)


def write_keys(path: Path, keys: Iterable[StoredKey]) -> None:
    """Replace the whole file, readable by its owner alone; JSON if its name ends with .json, else YAML."""
    tenants: dict[str, list[dict[str, str]]] = {}
    for key in keys:
        tenants.setdefault(key.tenant, []).append(_entry(key))
    whole = {"tenants": tenants}
    text = json.dumps(whole, indent=2) + "\n" if path.suffix == ".json" else yaml.safe_dump(whole, sort_keys=False)
    path = path.resolve()  # replace what a link points to, not the link
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _entry(key: StoredKey) -> dict[str, str]:
    more = {} if key.expires is None else {"expires": write_expiry(key.expires)}
    return {"sha256": key.sha256, **more, **({"scope": key.scope} if key.scope else {})}


def _stamp(path: Path) -> _Stamp | None:
    """Return a value that differs when the file does; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _text(path: Path) -> str:
    try:
        status = path.stat()
    except OSError as error:
        raise _bad(f"{(error.strerror or str(error)).lower()}; `motley keys new` makes one") from None
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _bad(f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o}); chmod 600 it")
    if status.st_uid not in (0, os.geteuid()):
        raise _bad(f"it belongs to user {status.st_uid}; expected this one, {os.geteuid()}, or root")
    if status.st_size > MAX_BYTES:
        raise _bad(f"it is larger than {MAX_BYTES} bytes")
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(f"it cannot be read: {error}") from None


def _parse(text: str) -> Iterable[StoredKey]:
    try:
        _check_names(yaml.compose(text, yaml.SafeLoader))
        whole = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _bad(f"it is neither YAML nor JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(whole, Mapping) or set(whole) != {"tenants"} or not isinstance(whole["tenants"], Mapping):
        raise _bad("expected one entry, `tenants`, of tenants and their keys")
    for tenant, entries in whole["tenants"].items():
        check_tenant(str(tenant))
        for number, entry in enumerate(entries if isinstance(entries, list) else [entries]):
            yield _key(str(tenant), entry, f"tenants.{tenant}[{number}]")


def _check_names(node: Any) -> None:
    """Raise ConfigurationError for a duplicate name, whose first keys would silently be lost."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for name, value in node.value:
            if str(name.value) in seen:
                raise _bad(f"{str(name.value)[:80]!r} appears twice; merge the two, or the first would be lost")
            seen.add(str(name.value))
            _check_names(value)


def _key(tenant: str, entry: Any, where: str) -> StoredKey:
    if isinstance(entry, str):
        return StoredKey(tenant, entry)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("sha256"), str):
        raise _bad(f"{where}: expected a SHA-256 in hex, or `sha256` with it and perhaps `expires` and `scope`")
    if unknown := sorted(str(name) for name in set(entry) - {"sha256", "expires", "scope"}):
        raise _bad(f"{where}: there is no {unknown[0]!r}; expected `sha256` and perhaps `expires` and `scope`")
    if (scope := entry.get("scope", "")) not in get_args(Scope) or ("scope" in entry and not scope):
        expected = " or ".join(filter(None, get_args(Scope)))
        raise _bad(f"{where}: scope {str(scope)[:40]!r} is not accepted; expected {expected}; tenants' keys have none")
    return StoredKey(tenant, entry["sha256"], read_expiry(entry.get("expires"), where), scope)


def _bad(message: str) -> ConfigurationError:
    return ConfigurationError(message, param="api_keys", code="bad_key_file")
