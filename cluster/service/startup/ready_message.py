"""Text that `motley serve` prints when it is ready: endpoints, examples, and one answer over each protocol."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ....client import Client
from ...ray_compat.environment import AUTH_TOKEN, AUTH_TOKEN_PATH
from ...ray_compat.visible_names import default_token_file, logs_folder
from ...security.edge.internal_client import InternalClient

PROMPT = "The with statement"
MAX_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses at which a running service is reached.

    proxy     what answers at these ports, such as "HAProxy 2.8.25"
    admin     address of the control plane; empty without one
    prefixes  where replicas share prompts' prefixes, in words
    start_s   seconds from the command to ready
    folder    folder of Ray's files
    """

    model: str
    http: str
    grpc: str
    proxy: str
    admin: str
    dashboard: str
    pid: int
    prefixes: str
    start_s: float
    folder: str


def show_first_responses(inside: InternalClient) -> None:
    """Print one answer streamed over gRPC and one over HTTP, by the clients that anyone would use."""
    print(f"\nover gRPC: {PROMPT}", end="", flush=True)
    with Client(inside.grpc, api_key=inside.key or None) as client:
        for chunk in client.stream(PROMPT, max_tokens=MAX_TOKENS, temperature=0.0):
            for choice in chunk.choices:
                print(choice.text, end="", flush=True)
    print(f"\n\nover HTTP: {PROMPT}", end="", flush=True)
    for text in _http_stream(inside):
        print(text, end="", flush=True)
    print(flush=True)


def dashboard_token_location(environ: Mapping[str, str]) -> str:
    """Return where the token of Ray's dashboard is, as Ray looks for it; the token itself is shown nowhere."""
    if environ.get(AUTH_TOKEN):
        return f"${AUTH_TOKEN}"
    return f"cat {environ.get(AUTH_TOKEN_PATH) or default_token_file()}"


def show_endpoints(endpoints: Endpoints, *, keys: bool = False) -> None:
    """Print the endpoints. `keys`: the service requires an API key; the examples show where it goes."""
    bearer = ' -H "Authorization: Bearer $MOTLEY_API_KEY"' if keys else ""
    names = "Client, Tls" if endpoints.http.startswith("https") else "Client"
    more = ', api_key="KEY"' if keys else ""
    more += ', tls=Tls(ca="CA.pem")' if "Tls" in names else ""
    print(
        f"""
{endpoints.model} is ready after {endpoints.start_s} s

  HTTP        {endpoints.http}/v1
  gRPC        {endpoints.grpc} (motley.v1.Inference)
  admin       {endpoints.admin or "none"}{" (motley fleet status)" if endpoints.admin else ""}
  proxy       {endpoints.proxy}
  prefixes    {endpoints.prefixes}
  metrics     {endpoints.http}/metrics{" (for a key made with --metrics, or an admin's)" if keys else ""}
  dashboard   {endpoints.dashboard} (asks for a token: {dashboard_token_location(os.environ)})
  logs        {logs_folder(Path(endpoints.folder))}

  curl {endpoints.http}/v1/completions{bearer} -H 'Content-Type: application/json' \\
    -d '{{"prompt": "{PROMPT}", "max_tokens": {MAX_TOKENS}, "stream": true}}'

  {sys.executable} -c '
from motley.client import {names}
for chunk in Client("{endpoints.grpc}"{more}).stream("{PROMPT}", max_tokens={MAX_TOKENS}):
    print("".join(choice.text for choice in chunk.choices), end="", flush=True)'

Ctrl-C stops it.""",
        flush=True,
    )


def _http_stream(inside: InternalClient) -> Iterator[str]:
    body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0.0, "stream": True}
    request = inside.request("/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                yield "".join(choice["text"] for choice in json.loads(data)["choices"])
