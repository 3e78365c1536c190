"""Addresses and keys of the control planes on this machine. Imports no Ray, so that `motley fleet` starts quickly."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path

from ...atomic_file import write_atomically
from ...security.edge.ports import is_listening

_FILE = "control.json"
_FOLDERS = "motley-*"  # names of the services' folders, which end with a process id (run_folder.py)


@dataclass(frozen=True, slots=True)
class ControlContact:
    """Address and key of a control plane.

    address  host and port
    key      admin key, generated anew at each start
    tls      whether the server has a certificate
    """

    address: str
    key: str
    tls: bool = False


def joined_service_folder(cluster: str) -> Path:
    """Create and return this user's folder for a service that outlives its deployer, on the cluster `cluster`."""
    folder = _joined_folders() / re.sub(r"[^A-Za-z0-9.-]", "_", cluster)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _joined_folders() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "motley" / "clusters"


def write_contact(folder: Path, contact: ControlContact) -> None:
    """Write the contact into a folder that only this user can open."""
    path = folder / _FILE
    write_atomically(path, json.dumps(asdict(contact)))
    path.chmod(0o600)


def find_contacts() -> list[ControlContact]:
    """Return the contacts of this user's services that run on this machine or were deployed from it, oldest first.

    Of two contacts with the same address the newer one counts, since the older service is ending or was killed.
    """
    joined = (found for folder in _joined_folders().glob("*") for found in _read(folder) if _listens(found[1]))
    here = (found for folder in _folders() for found in _read(folder))
    ordered = sorted((*joined, *here), key=itemgetter(0))
    return list({contact.address: contact for _, contact in ordered}.values())


def _listens(contact: ControlContact) -> bool:
    host, _, port = contact.address.rpartition(":")
    return is_listening(host.strip("[]"), int(port))


def _folders() -> Iterator[Path]:
    for parent in {Path(tempfile.gettempdir()), Path("/tmp")}:
        for folder in parent.glob(_FOLDERS):
            with suppress(OSError):
                if folder.stat().st_uid == os.geteuid() and _runs(folder):
                    yield folder


def _runs(folder: Path) -> bool:
    number = folder.name.removeprefix("motley-").partition(".")[0]
    if not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _read(folder: Path) -> Iterator[tuple[int, ControlContact]]:
    """Yield the contact in a folder, with the time it was written in ns.

    Nothing if the service is starting or ending.
    """
    path = folder / _FILE
    with suppress(OSError, ValueError, TypeError):
        yield path.stat().st_mtime_ns, ControlContact(**json.loads(path.read_text()))
