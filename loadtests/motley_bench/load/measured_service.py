"""Service that is measured: its address and description; it runs already, or is started for the benchmark."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motley.client import Client, Tls
from motley.cluster.security.edge.ports import FIXED_PORT_RANGE, is_free
from motley.cluster.service_errors import Forbidden, Unauthenticated
from motley.replicas.errors import MotleyError, Unavailable

from .load_senders import http_ssl_context

# Prompts are made of the tokens of this text, so of ids that a model's tokenizer gives for ordinary words.
WORDS = (
    "The quick brown fox jumps over the lazy dog while seven wizards count silver coins, compare long lists of "
    "numbers, and write down what they found in a small green book; nobody asked them to, and yet they never stop."
)
START_S = 600.0
STOP_S = 60.0
CALL_S = 120.0  # long enough for a busy machine


@dataclass(frozen=True, slots=True)
class MeasuredService:
    """Running service over one protocol.

    alphabet  token ids that prompts are made of
    null      it has the null engine, which computes nothing, so that figures are of the service alone
    """

    protocol: str
    target: str
    model: str
    alphabet: tuple[int, ...]
    max_model_len: int
    null: bool
    api_key: str | None = None
    tls: Tls | None = None


def inspect_service(protocol: str, target: str, api_key: str | None = None, tls: Tls | None = None) -> MeasuredService:
    """Request a running service's description. Raises Unavailable."""
    inspect = _inspect_grpc if protocol == "grpc" else _inspect_http
    try:
        model, ids, length, null = inspect(target, api_key, tls)
    except (Unauthenticated, Forbidden, urllib.error.HTTPError) as error:
        raise Unavailable(f"the service at {target} refuses the request: {error}") from error
    except (MotleyError, urllib.error.URLError, OSError) as error:
        raise Unavailable(f"no service answers at {target}: {error}; start one, or give --start") from error
    return MeasuredService(protocol, target, model, tuple(sorted(set(ids))), length, null, api_key, tls)


def _inspect_grpc(target: str, api_key: str | None, tls: Tls | None) -> tuple[str, Sequence[int], int, bool]:
    with Client(target, api_key=api_key, tls=tls, timeout_s=CALL_S, retries=0) as client:
        [model] = client.models()
        ids = client.tokenize(WORDS)
    return model.name, ids, model.max_model_len, model.family == "null"


def _inspect_http(base: str, api_key: str | None, tls: Tls | None) -> tuple[str, Sequence[int], int, bool]:
    model = _get(f"{base}/v1/models", api_key, tls)["data"][0]
    tokens = _get(f"{base}/tokenize", api_key, tls, {"prompt": WORDS})
    return model["id"], tokens["tokens"], tokens["max_model_len"], model.get("quantization") == "null"


def _get(url: str, api_key: str | None, tls: Tls | None, body: dict[str, Any] | None = None) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=CALL_S, context=http_ssl_context(tls)) as response:
        return json.load(response)


@contextmanager
def start_service(arguments: Sequence[str], python: str = sys.executable) -> Iterator[dict[str, str]]:
    """Run `motley serve` with these arguments on free ports, as a process; yield its endpoints and `pid`.

    `python` is the interpreter that has the Motley to start. Raises Unavailable if it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="motley-bench-") as folder:
        ready, log = Path(folder) / "ready.json", Path(folder) / "log"
        command = [python, "-m", "motley", "serve", *arguments, "--ready-file", str(ready)]
        for flag in ("--http-port", "--grpc-port"):
            command += [flag, str(_free_port())]
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield {**_wait_ready(process, ready, log), "pid": str(process.pid)}
        finally:
            process.terminate()
            process.wait(STOP_S)


def _wait_ready(process: subprocess.Popen[bytes], ready: Path, log: Path) -> dict[str, str]:
    deadline = time.monotonic() + START_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise Unavailable(f"the service did not start: {' '.join(log.read_text().split())[-500:]}")
        time.sleep(0.1)
    endpoints: dict[str, str] = json.loads(ready.read_text())
    return endpoints


def _free_port() -> int:
    while not is_free("127.0.0.1", port := random.randrange(*FIXED_PORT_RANGE)):
        pass
    return port
