"""Faults of a service whose processes are killed or stopped, one by one, under streams of three kinds of clients.

    python tests/support/process_faults.py --out faults.jsonl                every process, killed and stopped
    python tests/support/process_faults.py --only raylet:kill haproxy:stop   some of them
    python tests/support/process_faults.py --show faults.jsonl               the table of it, in Markdown

Each case has a service that is whole; one that a case has ended, or not left whole, is replaced. Streams take
`--stream-s` seconds of their own accord and begin before the fault. The door is asked for a token every 100 ms.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
from certificates import Certificates
from serve_process import Served, alive, command_line, descendants, wait_for
from service_checkpoint import build, write_tokenizer

from motley.client import Client, Tls, complete_request
from motley.cluster.protos import inference_pb2_grpc
from motley.cluster.security.auth.api_keys import StoredKey, hash_key, new_key
from motley.cluster.security.auth.key_file import edit_keys
from motley.cluster.service.supervision.watchdog import EXIT_SERVICE_LOST

REQUEST_PERIOD_S = 0.1  # between two requests that show whether the door is open
EACH = 2  # streams of each client: where one is lost with an ingress, another may be on the other one
TIMEOUT_S = 2.0  # of each of them
FOUND_S = 30.0
SIMULATED = "simulate: P40, simulate_model: qwen2.5-7b"  # 40 tokens a second, which cost nothing
REAL = "engine: {threads: 1, kv_memory: 128MiB}"
DIVIDED = f"{REAL}, tensor_parallel: 2"
CONTEXT = 131_072
STARTS = 3  # on a busy machine Ray may not come up in time
WHOLE_S = 60.0  # until a service that lives on has all its processes again
FLEET = """
model: {model}
served_model_name: tiny
pools:
  - {{name: main, {engine}, replicas: {{start: 2, min: 2, max: 2}}}}
service: {{ingresses: 2}}
"""


@dataclass(frozen=True)
class Role:
    """A process of the service.

    mark    what its command line holds
    last    it is the youngest of several, else the oldest
    engine  of the replicas, as the fleet file says it
    tls     of the service
    forked  it was forked from one with the same mark
    every   all of them are struck at once
    regex   grammar of all streams, and of the requests at the door
    fresh   each request at the door has a grammar of its own
    doubt   the model's tokenizer is used in a process of its own
    """

    title: str
    mark: str
    last: bool = False
    engine: str = SIMULATED
    tls: bool = False
    forked: bool = False
    every: bool = False
    regex: str = ""
    fresh: bool = False
    doubt: bool = False


GRAMMARS = "grammar_forkserver"
LETTERS = "[a-z ]*"  # goes on until max_tokens
ROLES = {
    "serve": Role("`motley serve` itself", ""),
    "gcs": Role("Ray's GCS", "/gcs_server "),
    "raylet": Role("Ray's raylet", "/raylet/raylet "),
    "dashboard": Role("Ray's dashboard", "/dashboard/dashboard.py "),
    "dashboard-module": Role("a module of Ray's dashboard, of 9", "ray-dashboard-NodeHead"),
    "dashboard-fork": Role("what starts the dashboard's modules", "multiprocessing.forkserver"),
    "agent": Role("Ray's dashboard agent", "ray::DashboardAgent"),
    "runtime-env": Role("Ray's runtime-env agent", "ray::RuntimeEnvAgent"),
    "log-monitor": Role("Ray's log monitor", "/log_monitor.py "),
    "monitor": Role("Ray's autoscaler monitor", "/monitor.py "),
    "controller": Role("Serve's controller", "ray::ServeController"),
    "manager": Role("HAProxy's manager", "ray::HAProxyManager"),
    "fallback": Role("Serve's own proxy, behind HAProxy", "ray::ProxyActor"),
    "haproxy": Role("HAProxy", "/bin/haproxy ", last=True),
    "haproxy-tls": Role("HAProxy, where TLS ends in it", "/bin/haproxy ", last=True, tls=True),
    "ingress": Role("an ingress, of 2", "ray::ServeReplica:motley:ingress"),
    "replica": Role("a replica of the pool, of 2", "ray::ServeReplica:motley:main"),
    "replica-real": Role("a replica that computes, of 2", "ray::ServeReplica:motley:main", engine=REAL),
    "control": Role("the control plane", "ray::ControlActor"),
    "guardian": Role("the guardian", "guardian.py "),
    "redis": Role("the Redis of its own", "-server unixsocket:", engine=REAL),
    "spare": Role("the process that waits for a replica", "ray::IDLE", engine=REAL),
    "grammar": Role("a replica's process that others for grammars are forked from, of 2", GRAMMARS, engine=REAL,
                    regex=LETTERS, fresh=True),
    "grammar-one": Role("the process of the one grammar in use, of 2", GRAMMARS, engine=REAL, forked=True,
                        last=True, regex="[a-z .]*"),  # no other role's, so that it is the youngest
    "grammar-all": Role("all processes for grammars, of both replicas", GRAMMARS, engine=REAL, every=True,
                        regex=LETTERS, fresh=True),
    "tokenizer": Role("the process for a tokenizer in doubt, of 2", "tokenizer_forkserver", engine=REAL, doubt=True),
    "tokenizer-all": Role("all processes for tokenizers in doubt", "tokenizer_forkserver", engine=REAL, every=True,
                          doubt=True),
    "rank": Role("the other process of a divided replica, of 2", ".follower_process", engine=DIVIDED),
    "divided": Role("a divided replica's first process, of 2", "ray::ServeReplica:motley:main", engine=DIVIDED),
}  # fmt: skip
HOW = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass
class Stream:
    """The output that one client received. ended: well; why: else, in its words."""

    tokens: int = 0
    ended: bool = False
    why: str = ""
    at_s: float = 0.0


@dataclass
class Case:
    """One row.

    stream_s  how long each stream takes
    shut_s    the longest time without an answer at the door
    answers   how often which, but for good ones
    load      of the machine as the fault began: processes that run or want to, over the last minute
    """

    role: str
    how: str
    streams: dict[str, Stream] = field(default_factory=dict)
    shut_s: float = 0.0
    answers: dict[str, int] = field(default_factory=dict)
    exit_code: int | None = None
    exit_s: float = 0.0
    said: str = ""
    left: list[str] = field(default_factory=list)
    whole_again: bool = True
    stream_s: float = 100.0
    load: float = 0.0


@dataclass
class Reached:
    """A service, and how its clients come to it: over TLS with a key, or in the clear without one."""

    service: Served
    certificates: Certificates | None = None
    key: str | None = None
    role: Role = field(default_factory=lambda: ROLES["serve"])
    asked: Iterator[int] = field(default_factory=itertools.count)

    @property
    def over_http(self) -> dict[str, Any]:
        return {"structured_outputs": {"regex": self.role.regex}} if self.role.regex else {}

    @property
    def over_grpc(self) -> dict[str, Any]:
        return {"grammar": {"regex": self.role.regex}} if self.role.regex else {}

    @property
    def at_the_door(self) -> dict[str, Any]:
        if self.role.fresh:
            return {"structured_outputs": {"regex": f"(x|q{next(self.asked)}){self.role.regex}"}}
        return self.over_http

    def http(self, timeout_s: float) -> http.client.HTTPConnection:
        if self.certificates is None:
            return http.client.HTTPConnection("127.0.0.1", self.service.http_port, timeout=timeout_s)
        context = self.certificates.client_context(own=False)
        return http.client.HTTPSConnection("127.0.0.1", self.service.http_port, timeout=timeout_s, context=context)

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.key}"),) if self.key else ()

    def channel(self) -> grpc.Channel:
        if self.certificates is None:
            return grpc.insecure_channel(self.service.grpc)
        return grpc.secure_channel(self.service.grpc, self.certificates.channel_credentials(own=False))

    def client(self) -> Client:
        tls = None if self.certificates is None else Tls(ca=self.certificates.ca)
        return Client(self.service.grpc, api_key=self.key, tls=tls)


class Door:
    """Asks for a token again and again."""

    def __init__(self, reached: Reached) -> None:
        self._reached = reached
        self.good: list[float] = []
        self.bad: list[tuple[float, str]] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._poll, daemon=True) for _ in range(2)]

    def __enter__(self) -> Door:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _poll(self) -> None:
        while not self._ended.wait(REQUEST_PERIOD_S):
            reply = send(self._reached)
            if reply == "200":
                self.good.append(time.monotonic())
            else:
                self.bad.append((time.monotonic(), reply))

    def shut_s(self, since: float, until: float) -> float:
        """The longest time without a good answer, but for what an answer takes."""
        times = [since, *sorted(at for at in self.good if since <= at <= until), until]
        return max(after - before for before, after in pairwise(times))


def send(reached: Reached) -> str:
    """The status, or how there was none."""
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1, **reached.at_the_door})
    connection = reached.http(TIMEOUT_S)
    try:
        connection.request("POST", "/v1/completions", body, reached.headers)
        response = connection.getresponse()
        response.read()
        after = response.getheader("Retry-After")
        return str(response.status) + (f" (Retry-After: {after})" if after else "")
    except TimeoutError:
        return "none in time"
    except ConnectionRefusedError:
        return "refused"
    except (OSError, http.client.HTTPException):
        return "cut"
    finally:
        connection.close()


def over_sse(reached: Reached, tokens: int, stream: Stream) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body |= reached.over_http
    connection = reached.http(60)
    connection.request("POST", "/v1/completions", json.dumps(body), reached.headers)
    response = connection.getresponse()
    for line in response:
        if line.startswith(b"data: [DONE]"):
            stream.ended = True
            return
        if line.startswith(b"data: "):
            said = json.loads(line[6:])
            if "error" in said:
                stream.why = f"error event {said['error']['code']}"
                return
            stream.tokens += bool(said["choices"])
    stream.why = "ended in silence"


def over_grpc(reached: Reached, tokens: int, stream: Stream) -> None:
    with reached.channel() as channel:
        request = complete_request("a", {"max_tokens": tokens, "ignore_eos": True, **reached.over_grpc})
        stub = inference_pb2_grpc.InferenceStub(channel)
        for chunk in stub.CompleteStream(request, metadata=reached.metadata):
            stream.tokens += sum(len(choice.token_ids) for choice in chunk.choices)
    stream.ended = True


def over_client(reached: Reached, tokens: int, stream: Stream) -> None:
    with reached.client() as client:
        for chunk in client.stream("a", max_tokens=tokens, ignore_eos=True, **reached.over_grpc):
            stream.tokens += sum(len(choice.token_ids) for choice in chunk.choices)
    stream.ended = True


CLIENTS: dict[str, Callable[[Reached, int, Stream], None]] = {
    "SSE": over_sse,
    "gRPC": over_grpc,
    "motley.client": over_client,
}


def tokens_per_s(reached: Reached) -> float:
    """Return the speed of one stream, beside as many as there will be, when nothing else is requested."""
    with ThreadPoolExecutor(EACH * len(CLIENTS)) as threads:
        rates = [threads.submit(rate_of_one, reached) for _ in range(EACH * len(CLIENTS))]
        return statistics.mean(rate.result() for rate in rates)


def rate_of_one(reached: Reached) -> float:
    began, stream = 0.0, Stream()
    with reached.client() as client:
        for chunk in client.stream("a", max_tokens=60, ignore_eos=True, **reached.over_grpc):
            began = began or time.monotonic()
            stream.tokens += sum(len(choice.token_ids) for choice in chunk.choices)
    return (stream.tokens - 1) / (time.monotonic() - began)


def heard(read: Callable[[Reached, int, Stream], None], reached: Reached, tokens: int, stream: Stream) -> None:
    try:
        read(reached, tokens, stream)
    except grpc.RpcError as error:
        stream.why = error.code().name
    except Exception as error:  # noqa: BLE001  whatever a client meets is what is asked for
        stream.why = f"{type(error).__name__} {getattr(error, 'code', '') or ''}".strip()
    stream.at_s = time.monotonic()


def process_of(service: Served, role: Role) -> int | None:
    found = processes_of(service, role)
    return (found[-1] if role.last else found[0]) if found else None


def processes_of(service: Served, role: Role) -> list[int]:
    """Return the processes that the role may mean, from the oldest: of HAProxy's, the one that listens was started
    last.
    """
    if not role.mark:
        return [service.process.pid]
    found = [pid for pid in descendants(service.process.pid) if role.mark in command_line(pid)]
    return sorted((pid for pid in found if not role.forked or int(report_of(pid, 1)) in found), key=began)


def began(pid: int) -> int:
    return int(report_of(pid, 19))


def report_of(pid: int, place: int) -> str:
    """A field of /proc/PID/stat, from its state (0)."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[place]
    return "0"


def run(reached: Reached, name: str, how: str, stream_s: float, say: Callable[[str], None]) -> Case:
    """One case, to the end of all its streams and until the service is whole again, or has ended."""
    service, case = reached.service, Case(name, how, stream_s=stream_s)
    role = reached.role = ROLES[name]
    tokens = min(round(stream_s * tokens_per_s(reached)), CONTEXT - 1000)
    with Door(reached) as door, ThreadPoolExecutor(EACH * len(CLIENTS)) as threads:
        futures = []
        for client, read in CLIENTS.items():
            for number in range(EACH):
                stream = case.streams[f"{client} {number}"] = Stream()
                futures.append(threads.submit(heard, read, reached, tokens, stream))
        wait_for(lambda: all(one.tokens > 20 for one in case.streams.values()), "streams")
        pid = wait_for(lambda: process_of(service, role), f"a process that is {role.title}", FOUND_S)
        pids = processes_of(service, role) if role.every else [pid]
        before = service.descendants()
        case.load = round(os.getloadavg()[0], 1)
        struck = time.monotonic()
        for pid in pids:
            with suppress(ProcessLookupError):  # of a grammar that was let go
                os.kill(pid, HOW[how])
        say(f"{name} {pids}: {how}")
        for future in futures:
            while not future.done() and time.monotonic() < struck + 2 * stream_s:
                note_end(service, case, struck)
                time.sleep(0.1)
        for stream in case.streams.values():
            stream.at_s = round(stream.at_s - struck, 1) if stream.at_s else 0.0
        settle(reached, case, struck, [*before, service.process.pid])
        until = struck + case.exit_s if case.exit_code is not None else time.monotonic()
        case.shut_s = round(door.shut_s(struck, until), 1)
        for at, reply in door.bad:
            if struck <= at <= until:
                case.answers[reply] = case.answers.get(reply, 0) + 1
    for pid in pids if how == "stop" else ():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return case


def note_end(service: Served, case: Case, struck: float) -> None:
    if case.exit_code is None and service.process.poll() is not None:
        case.exit_code = service.process.returncode
        case.exit_s = round(time.monotonic() - struck, 1)


def settle(reached: Reached, case: Case, struck: float, before: list[int]) -> None:
    """Whether it is whole again, where it goes on; what it has left, where it has ended."""
    service, deadline = reached.service, time.monotonic() + WHOLE_S
    while time.monotonic() < deadline:
        note_end(service, case, struck)
        if case.exit_code is not None:
            break
        if send(reached) == "200" and all(
            process_of(service, ROLES[needed]) for needed in ("controller", "manager", "haproxy", "ingress", "replica")
        ):
            return
        time.sleep(0.5)
    else:
        case.whole_again = False
        return
    case.said = last_line(service.output)

    def left() -> list[str]:
        named = [path for path in service.leftovers() if f"{path}/" in case.said]  # kept for its logs
        left = [path for path in service.leftovers() if path not in named]
        ready = [str(service.ready)] if service.ready.exists() else []
        return [line[:60] for line in alive(before)] + left + ready

    with suppress(AssertionError):
        wait_for(lambda: not left(), "the end of all", 15)
    case.left = left()
    for pid in before:
        with suppress(ProcessLookupError):
            if alive([pid]):
                os.kill(pid, signal.SIGKILL)


def last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith("motley serve: ")]
    return lines[-1] if lines else ""


def cases(only: list[str]) -> Iterator[tuple[str, str]]:
    for name in ROLES:
        for how in HOW:
            if not only or f"{name}:{how}" in only or name in only:
                yield name, how


def start(folder: Path, role: Role) -> Reached:
    """A service that is ready. One that says it is to be started again is, as a service manager would."""
    (folder / "fleet.yaml").write_text(FLEET.format(model=folder / "model", engine=role.engine))
    write_tokenizer(folder / "model")
    if role.doubt:
        put_in_doubt(folder / "model" / "tokenizer.json")
    certificates, key, tls = None, None, []
    if role.tls:
        certificates, key = Certificates(folder), new_key()
        with edit_keys(folder / "keys.yaml") as keys:
            keys[:] = [StoredKey("tester", hash_key(key))]
        paths = {"cert": certificates.cert, "key": certificates.key}
        tls = [*(f"--tls-{name}={path}" for name, path in paths.items()), f"--api-keys={folder / 'keys.yaml'}"]
    for _ in range(STARTS):
        (folder / "ready.json").unlink(missing_ok=True)
        service = Served([str(folder / "fleet.yaml"), *tls], folder)
        try:
            service.wait_ready()
        except BaseException:
            end(service)
            if service.process.returncode != EXIT_SERVICE_LOST:
                raise
        else:
            return Reached(service, certificates, key)
    raise AssertionError(f"ended with {EXIT_SERVICE_LOST} {STARTS} times: {service.output}")


def put_in_doubt(file: Path) -> None:
    """Have a tokenizer split texts by an expression whose time is not bounded."""
    state = json.loads(file.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, state["pre_tokenizer"]]}
    file.write_text(json.dumps(state))


def end(service: Served) -> None:
    """The service and all that it has left."""
    if service.process.poll() is None:
        with suppress(Exception):
            service.interrupt()
    for pid in service.descendants():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if service.process.poll() is None:
        service.process.kill()
        service.process.wait()
    for path in service.leftovers():
        shutil.rmtree(path, ignore_errors=True)
    return None


def run_all(only: list[str], stream_s: float, out: Path | None, say: Callable[[str], None]) -> list[Case]:
    done: list[Case] = []
    reached: Reached | None = None
    runs = None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        build(folder / "model", max_len=CONTEXT)
        try:
            for role, how in cases(only):
                wanted = (ROLES[role].engine, ROLES[role].tls, ROLES[role].doubt)
                if reached is not None and runs != wanted:
                    reached = end(reached.service)
                if reached is None:
                    reached, runs = start(folder, ROLES[role]), wanted
                case = run(reached, role, how, stream_s, say)
                done.append(case)
                say(row(case))
                if out is not None:
                    with out.open("a") as file:
                        file.write(json.dumps(asdict(case)) + "\n")
                gone = (
                    case.exit_code is not None or process_of(reached.service, ROLES[role]) is None
                )  # as the dashboard
                refused = how == "kill" and bool(ROLES[role].regex)  # the grammar is, for a minute
                if gone or refused or not case.whole_again:
                    reached = end(reached.service)
        finally:
            if reached is not None:
                end(reached.service)
    return done


def reported(stream: Stream) -> str:
    return "whole" if stream.ended else f"{stream.why or 'silent'} at {stream.at_s:g} s"


def of(case: Case, client: str) -> list[Stream]:
    return [stream for name, stream in case.streams.items() if name.startswith(client)]


def row(case: Case) -> str:
    answers = ", ".join(f"{count} × {reply}" for reply, count in sorted(case.answers.items())) or "none bad"
    if case.exit_code is not None:
        said = re.sub(r" \(logs: \S+\)", "", case.said)
        then = f"ends after {case.exit_s:g} s with {case.exit_code}" + (f", “{said}”" if said else "")
        then += "" if not case.left else f"; left: {', '.join(case.left)}"
    else:
        then = "goes on" if case.whole_again else "goes on, not whole"
    met = ("; ".join(sorted({reported(one) for one in of(case, name)})) for name in CLIENTS)
    cells = [ROLES[case.role].title, f"{case.how}, {case.stream_s:g} s", *met, f"{case.shut_s:g} s", answers, then]
    return f"| {' | '.join(cells)} |"


def table(found: list[Case]) -> str:
    heads = ["process", "how, streams of", *CLIENTS, "door shut", "answers that were not 200", "the service"]
    return "\n".join([f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *map(row, found)])


def read(path: Path) -> list[Case]:
    found = {}
    for line in path.read_text().splitlines():
        said: dict[str, Any] = json.loads(line)
        said["streams"] = {name: Stream(**stream) for name, stream in said["streams"].items()}
        found[said["role"], said["how"]] = Case(**said)
    return [found[name, how] for name, how in cases([]) if (name, how) in found]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[], help="such as raylet:kill, or haproxy")
    parser.add_argument("--stream-s", type=float, default=100.0)
    parser.add_argument("--out", type=Path, help="a line of JSON for each case, appended")
    parser.add_argument("--show", type=Path, help="print the table of such a file, and end")
    options = parser.parse_args()
    if options.show is None:
        found = run_all(options.only, options.stream_s, options.out, lambda line: print(line, file=sys.stderr))
    else:
        found = read(options.show)
    print(table(found))


if __name__ == "__main__":
    main()
