"""Processes of divided models without their imports: `python forking.py FD ROOM` has imported, and forks them.

Of the CPU time of a test with such processes, most was in importing torch, once for each of them.

What is forked is what `subprocess.Popen` would have started: a child of the process that asked, of the same command
line, environment, folder and descriptors, with none of the zygote's threads, for it has none, and with its own start
and end of `__main__`. Alone what is drawn once for a process, the seed of `hash`, all of them have in common. Tests of
the start itself have real ones: `pytest.mark.started`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)
_MAX_COMMAND = 16 << 10  # for the longest command line
_MESSAGE = 200 << 10
_IMPORTED = (
    "motley.replicas.parallel.follower.follower_loop",
    "motley.replicas.engine.startup.engine_builder",
    "motley.replicas.loading.model_loader",
    "late_device",
    "late_exchange",
    "torch._dynamo",  # by the first operator of ours that torch dispatches
    "safetensors.torch",
    "numpy.ctypeslib",
)
_DEFAULT = (signal.SIGINT, signal.SIGPIPE)


class Zygote:
    """Started by the first who asks. Ends with this process, or when it is closed.

    Stands for the module `subprocess` in replicas/parallel/leader/launcher.py.
    """

    DEVNULL = subprocess.DEVNULL

    def __init__(self) -> None:
        self._own, self._its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def Popen(self, args: Sequence[str], *, stdin: int, stdout: Any, pass_fds: Sequence[int]) -> Forked:
        assert (args[0], stdin) == (sys.executable, self.DEVNULL)
        sys.audit("subprocess.Popen", args[0], [*args], None, None)  # for who counts processes
        said = json.dumps([args[1:], pass_fds, os.getcwd(), dict(os.environ)]).encode()
        with self._lock:
            self._start()
            # A process whose parent has ended comes to its nearest subreaper: for this moment, that is this one.
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._own, [said], [stdout.fileno(), 2, *pass_fds])
                response = self._own.recv(64)
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if not response:
            raise OSError("the zygote has ended; its output says why")
        return Forked(int(response))

    def close(self) -> None:
        self._own.close()
        self._its.close()
        if self._process is not None:
            self._process.wait()

    def _start(self) -> None:
        if self._process is None:
            command = [sys.executable, __file__, str(self._its.fileno()), " " * _MAX_COMMAND]
            alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # numpy would start others as it is imported
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[self._its.fileno()], env=alone
            )
            self._its.close()


class Forked:
    """A child as `subprocess.Popen` has it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def wait(self) -> int:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:  # from here on the number may be another's
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self.returncode is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _prctl(*given: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(*given):
        raise OSError(ctypes.get_errno(), "prctl")


def _serve(questions: socket.socket) -> list[str]:
    """Returns in each process that is forked, with what Python is to run there; in this one, never."""
    while True:
        said, given, _, _ = socket.recv_fds(questions, _MESSAGE, 64)
        if not said:
            sys.exit()
        args, numbers, folder, environment = json.loads(said)
        reads, writes = os.pipe()
        if not (between := os.fork()):
            between = os.getpid()
            if forked := os.fork():
                os.write(writes, str(forked).encode())
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            questions.detach()
            _take(given, numbers)
            _become(args, folder, environment)
            return list(args)
        os.waitpid(between, 0)  # by then what it has forked is the asker's
        questions.send(os.read(reads, 64))
        for descriptor in (reads, writes, *given):
            os.close(descriptor)


def _take(given: Sequence[int], numbers: Sequence[int]) -> None:
    """stdout, stderr and the rest by their numbers, and no others."""
    numbers = [1, 2, *numbers]
    above = max(*given, *numbers) + 1
    os.closerange(above, os.sysconf("SC_OPEN_MAX"))
    for place, descriptor in enumerate(given):
        os.dup2(descriptor, above + place)
    for place, number in enumerate(numbers):
        os.dup2(above + place, number)
    retained = {0, *numbers}
    for descriptor in range(above + len(given)):
        if descriptor not in retained:
            _close(descriptor)


def _close(descriptor: int) -> None:
    os.closerange(descriptor, descriptor + 1)  # it may be no descriptor


def _become(args: Sequence[str], folder: str, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start, end = (int(word) for word in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = "\0".join([sys.executable, *args]).encode()
    assert len(line) < end - start, "a command line without room"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, line, len(line))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the asker, which ends it
    questions = socket.socket(fileno=int(sys.argv[1]))
    questions.set_inheritable(False)
    for name in _IMPORTED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread, which no fork has"
    gc.collect()
    gc.freeze()  # no process that is forked walks, and so copies, what all have
    kind, *rest = _serve(questions)
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    main()
