"""Which ports the processes of a service listen on, from /proc."""

from __future__ import annotations

import ipaddress
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from serve_process import command_line

LISTEN = "0A"


@dataclass(frozen=True)
class Listener:
    address: str
    port: int
    command: str

    @property
    def loopback(self) -> bool:
        address = ipaddress.ip_address(self.address)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback


def listeners(pids: list[int]) -> list[Listener]:
    """Return the listeners of these processes, each port once for each address."""
    owners = {}
    for pid in pids:
        with suppress(OSError):  # it ended meanwhile
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    owners.setdefault(os.readlink(file), pid)
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            owner = owners.get(f"socket:[{fields[9]}]")
            if fields[3] == LISTEN and owner is not None:
                address, _, port = fields[1].partition(":")
                with suppress(OSError):
                    found.add(Listener(_address(address), int(port, 16), command_line(owner)))
    return sorted(found, key=lambda one: one.port)


def _address(text: str) -> str:
    """The kernel writes words of four bytes, each in the machine's order."""
    words = [int(text[start : start + 8], 16).to_bytes(4, "little") for start in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
