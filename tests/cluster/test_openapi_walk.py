"""Every route is made to refuse in every way that a client can bring about: each status and code is in the document."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asgi
import pytest
from api_reference.errors_section import client_errors
from api_reference.raised_codes import FAMILY, RaisedError, raised_errors
from echo_worker import EchoWorker
from local_ingress import make_ingress
from openapi_conformance import PATHS, check_answer, operation_of

from motley.cluster.api.openapi_routes import OPERATIONS, REFUSALS
from motley.cluster.security.auth.api_keys import StoredKey, hash_key, new_key
from motley.cluster.security.auth.key_file import write_keys
from motley.cluster.service.deployment.ingress_config import IngressConfig

WORKING = [("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/v1/embeddings")]
ASKED: dict[str, Any] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/embeddings": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [65]},
    "/v2/repository/index": {"ready": True},
    "/v2/models/echo/generate": {"text_input": "a"},
    "/v2/models/echo/generate_stream": {"text_input": "a"},
    "/v2/models/echo/infer": {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}]},
}
EVERY = [(method, re.sub(r":path}", "}", path)) for method, path in [*OPERATIONS, *REFUSALS]]
FILLED = {"name": "echo", "number": "1", "rest": "some/more"}


@pytest.fixture(scope="module")
async def app(folder: Path, worker: EchoWorker) -> Any:
    strict = IngressConfig(unknown_fields="refuse")
    return (await make_ingress(folder, worker, ingress_config=strict)).__serve_build_asgi_app__()


@pytest.fixture(scope="module")
async def keyed(folder: Path, worker: EchoWorker, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write_keys(path, [StoredKey("alice", hash_key(new_key()))])
    return (await make_ingress(folder, worker, ingress_config=IngressConfig(api_keys=path))).__serve_build_asgi_app__()


def filled(path: str) -> str:
    return re.sub(r"{(\w+)}", lambda found: FILLED[found[1]], path)


def told(method: str, path: str, reply: asgi.Reply) -> tuple[int, str | None]:
    """Return the response, which the document has; its code where the protocol has codes."""
    operation = PATHS[path][method.lower()]
    check_answer(operation, reply)
    if reply.headers["content-type"] != "application/json" or reply.body.startswith(b"["):
        return reply.status, None
    error = reply.json().get("error", {})
    return reply.status, error.get("code") if isinstance(error, dict) else None


def ways(method: str, path: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield what is sent, and the status that comes of it."""
    good = ASKED.get(filled(path).replace("/versions/1", ""), b"")
    refused = (method, path) in {(method, re.sub(r":path}", "}", path)) for method, path in REFUSALS}
    yield {"body": good, "headers": {"host": "evil.example"}}, 403
    yield {"body": good, "headers": {"x-request-disconnect-disabled": "?1"}}, 400
    yield {"body": good}, 404 if refused else 200
    if method == "POST":
        yield {"body": good, "headers": {"content-length": "9000000"}}, 413
    if refused:
        return
    yield (
        {"body": good, "query": b"a=b"},
        200 if "health" in path or path in ("/ping", "/metrics") else 400,
    )  # what a probe or a scraper adds there is its own
    if method == "POST":
        yield {"body": b"{}", "headers": {"content-type": "text/plain"}}, 415
        yield {"body": b"{"}, 400
        yield {"body": b"{}"}, 200 if path == "/v2/repository/index" else 400
        yield {"body": {**good, "unheard_of": 1}}, 400
        yield {"body": b'{"a": [' + b"[]," * 400_000 + b"[]]}"}, 413
        if "model" in path or path.startswith("/v1") or "token" in path:
            named = {**good, "model": "another"} if "{name}" not in path else good
            yield {"body": named, "path": path.replace("{name}", "another")}, 404
    elif "{name}" in path:
        yield {"path": path.replace("{name}", "another")}, 404
    if "{number}" in path:
        yield {"body": good, "path": path.replace("{number}", "7")}, 404


@pytest.mark.parametrize(("method", "path"), EVERY)
async def test_what_clients_can_bring_about(app: Any, keyed: Any, method: str, path: str) -> None:
    seen = set()
    for sent, status in ways(method, path):
        given = {"path": path, **sent}
        reply = await asgi.request(app, method, filled(given.pop("path")), given.pop("body", b""), **given)
        assert reply.status == status, (sent, reply.body[:300])
        seen.add(told(method, path, reply))
    reply = await asgi.request(keyed, method, filled(path))
    assert reply.status == 401
    seen.add(told(method, path, reply))
    assert len(seen) >= 4


@pytest.mark.parametrize("path", sorted({path for _, path in EVERY}))
async def test_other_methods(app: Any, path: str) -> None:
    for other in {"PUT", "PATCH", "DELETE", "POST", "OPTIONS"} - {method for method, known in EVERY if known == path}:
        reply = await asgi.request(app, other, filled(path))
        assert reply.status == 405
        for method in PATHS[path]:
            told(method, path, reply)


@pytest.mark.parametrize(("method", "path"), WORKING)
async def test_what_replicas_and_routing_raise(
    app: Any, worker: EchoWorker, method: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each error that a replica's own code, or the choice of one, can end a request with."""
    engines = [
        one
        for one in client_errors(raised_errors())
        if one.folder.startswith("cluster/routing")
        or (one.folder.startswith("replicas") and one.folder != "replicas/updates")
        if FAMILY[one.kind].status != 408
    ]
    assert len(engines) > 20

    def failing(one: RaisedError) -> Any:
        async def generate(request: Any) -> Any:
            raise FAMILY[one.kind]("it broke", code=one.code)
            yield

        return generate

    for one in engines:
        monkeypatch.setattr(worker, "generate", failing(one))
        reply = await asgi.request(app, method, path, {**ASKED[path], "timeout_s": 0.1})
        assert reply.status != 200
        told(method, path, reply)


def test_the_edge_is_told_everywhere() -> None:
    for path, methods in PATHS.items():
        for method in methods:
            assert {"404", "408", "431", "500", "503", "504"} <= operation_of(method, path)["responses"].keys()
