"""Processes of a model on other hosts, as far as files go: `python remote_hosts.py HOST ENDS`, by `Elsewhere`.

HOST: JSON, what that host has of its own, see `Host`. Such processes are called, and share no memory, as far ones do.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from motley.replicas.parallel.follower import follower_process
from motley.replicas.parallel.leader.launcher import ProcessHandle, SubprocessLauncher
from motley.replicas.parallel.transport import pipe


@dataclass(frozen=True)
class Host:
    """folder: where it has the model; temporary: its temporary files; None: as the first process has them.

    full  how often it says that its disk is
    """

    folder: str | None = None
    temporary: str | None = None
    full: int = 0


class Elsewhere(SubprocessLauncher):
    """Implements `Launcher`. hosts: of each of the others."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts

    def host(self) -> str | None:
        return "127.0.0.1"

    def launch(self, number: int, name: str, ends: Mapping[str, int]) -> ProcessHandle:
        self.run = (str(Path(__file__)), json.dumps(asdict(self._hosts[number - 1])))
        handle = super().launch(number, name, ends)
        handle.shares_memory = False
        return handle


def main() -> None:
    host = Host(**json.loads(sys.argv.pop(1)))
    if host.temporary is not None:
        os.environ["TMPDIR"] = host.temporary
    receive, allocate, left = pipe.MessagePipe.receive, os.posix_fallocate, [host.full]

    def elsewhere(one: pipe.MessagePipe) -> pipe.Message:
        fields, tensors = receive(one)
        if host.folder is not None and "folder" in fields:
            fields["folder"] = host.folder
        return fields, tensors

    def full(*given: int) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(*given)

    pipe.MessagePipe.receive = elsewhere  # type: ignore[method-assign]
    os.posix_fallocate = full
    follower_process.main()


if __name__ == "__main__":
    main()
