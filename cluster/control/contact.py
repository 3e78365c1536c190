"""How control planes on this machine are reached. Imports no Ray: `motley fleet` starts quickly."""

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

from ..edge.ports import listens
from ..folder import write_whole

__all__ = ["Contact", "contacts", "joined_folder", "write_contact"]

_FILE = "control.json"
_FOLDERS = "motley-*"  # as folder.py calls them, with the process's id


@dataclass(frozen=True, slots=True)
class Contact:
    """key: made anew at each start. tls: the server has a certificate."""

    address: str
    key: str
    tls: bool = False


def joined_folder(cluster: str) -> Path:
    """Of a service that outlives who deployed it: this user's, on a cluster with this address."""
    folder = _joined_folders() / re.sub(r"[^A-Za-z0-9.-]", "_", cluster)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _joined_folders() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "motley" / "clusters"


def write_contact(folder: Path, contact: Contact) -> None:
    """Into a folder that is open to nobody else."""
    path = folder / _FILE
    write_whole(path, json.dumps(asdict(contact)))
    path.chmod(0o600)


def contacts() -> list[Contact]:
    """Of the services of this user that run here, or were deployed from here.

    Of two with one address the older is ending, or was killed.
    """
    joined = (found for folder in _joined_folders().glob("*") for found in _read(folder) if _listens(found[1]))
    here = (found for folder in _folders() for found in _read(folder))
    ordered = sorted((*joined, *here), key=itemgetter(0))
    return list({contact.address: contact for _, contact in ordered}.values())


def _listens(contact: Contact) -> bool:
    host, _, port = contact.address.rpartition(":")
    return listens(host.strip("[]"), int(port))


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


def _read(folder: Path) -> Iterator[tuple[int, Contact]]:
    """With when it was written; nothing of one that is starting or ending."""
    path = folder / _FILE
    with suppress(OSError, ValueError, TypeError):
        yield path.stat().st_mtime_ns, Contact(**json.loads(path.read_text()))
