"""Starting, refusing to start, and leaving nothing behind."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError

import grpc
import pytest
import serve_api
from grpc_health.v1 import health_pb2, health_pb2_grpc
from otlp_collector import Collector, collecting
from raw_http import Answer, post
from safetensors.torch import load_file, save_file
from serve_process import START_S, Served, alive, served, wait_for
from thorough import thorough

from motley.client import Client
from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc


def refuse(folder: Path, *arguments: str, **environment: str) -> str:
    """Start, and fail at once; the one line that says why."""
    with served(list(arguments), folder, environment) as service:
        assert service.process.wait(60) == 1
        assert service.leftovers() == []
        [line] = service.output.strip().splitlines()
    return line


@pytest.mark.parametrize("host", ["0.0.0.0", *thorough("::", "192.0.2.1")])
def test_without_keys_it_binds_to_loopback_only(checkpoint: Path, tmp_path: Path, host: str) -> None:
    line = refuse(tmp_path, str(checkpoint), "--host", host)
    assert host in line
    assert "--host 127.0.0.1" in line, "the remedy"


def test_rays_own_wall_must_stand(checkpoint: Path, tmp_path: Path) -> None:
    assert "RAY_AUTH_MODE" in refuse(tmp_path, str(checkpoint), RAY_AUTH_MODE="disabled")


@pytest.mark.parametrize("flag", ["--grpc-port", *thorough("--http-port", "--dashboard-port")])
def test_a_port_that_is_taken(checkpoint: Path, tmp_path: Path, flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = refuse(tmp_path, str(checkpoint), flag, port)
    assert f"{flag} {port}" in line
    assert "choose another" in line


def test_a_bad_checkpoint_is_one_line_that_names_the_file(checkpoint: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(checkpoint, bad)
    weights = bad / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    line = refuse(tmp_path, str(bad))
    assert "model.safetensors" in line
    assert "truncated" in line
    assert "convert" in line, "the remedy"


def test_a_checkpoint_without_a_tokenizer_is_refused_before_anything_starts(checkpoint: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(checkpoint, bad)
    (bad / "tokenizer.json").unlink()
    line = refuse(tmp_path, str(bad))
    assert "tokenizer.json: is missing" in line
    assert "put the tokenizer's files into the folder" in line


@pytest.mark.thorough
def test_what_only_loading_finds_is_one_line_too(checkpoint: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(checkpoint, bad)
    tensors = load_file(bad / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, bad / "model.safetensors")
    with served([str(bad)], tmp_path) as service:
        assert service.process.wait(120) == 1
        started, loading, reported = service.output.strip().splitlines()
        assert started == "starting Ray"
        assert loading.startswith("loading ")
        assert "model.safetensors · model.norm.weight: has values that are not finite" in reported
        logs = Path(reported.partition("(logs: ")[2].rstrip(")"))
        assert list(logs.glob("serve/*.log")), "kept, since somebody will want to read them"


@pytest.mark.parametrize("number", [signal.SIGINT, *thorough(signal.SIGTERM)])
def test_stopped_while_it_starts(checkpoint: Path, tmp_path: Path, number: signal.Signals) -> None:
    with served([str(checkpoint)], tmp_path) as service:
        wait_for(lambda: len(service.descendants()) > 3, "Ray's processes", START_S)
        children = service.descendants()
        assert service.interrupt(number) == 130
        assert alive(children) == []
        assert service.leftovers() == []


def test_it_greets_drains_and_leaves_nothing(service: Served, checkpoint: Path, tmp_path: Path) -> None:
    """Beside another service on the same machine, which notices nothing."""
    arguments = [str(checkpoint), "--served-model-name", "second", "--greet", "--drain-s", "120"]
    arguments += ["--log-format", "json", "--keep-logs", str(tmp_path / "kept")]
    with collecting() as collector, served([*arguments, "--otlp-endpoint", collector.endpoint], tmp_path) as second:
        second.wait_ready()
        for part in ("over gRPC: ", "over HTTP: ", second.http, second.grpc, "curl ", "motley.client", "dashboard"):
            assert part in second.output
        for _ in range(20):  # each over a connection of its own, and never to the neighbour
            with Client(second.grpc) as client:
                assert [model.name for model in client.models()] == ["second"]
            with Client(service.grpc) as client:
                assert [model.name for model in client.models()] == ["tiny"]
        for name, lines in serve_api.replica_logs(second).items():
            loggers = [json.loads(line).get("logger", "") for line in lines]
            assert any(logger.startswith("motley.") for logger in loggers), f"on the page of {name}"
        children = second.descendants()
        wait_for(lambda: {"CompleteStream", "POST /v1/completions"} <= traced(collector), "spans of the greetings")
        length = 2000
        with Client(second.grpc, retries=0) as client, ThreadPoolExecutor() as threads:
            stream = client.stream("abc", max_tokens=length, ignore_eos=True)
            next(stream)
            body = {"prompt": "abc", "max_tokens": length, "ignore_eos": True}
            over_http = [
                threads.submit(asyncio.run, post(second.http_port, "/v1/completions", {**body, "stream": streamed}))
                for streamed in (True, False)
            ]
            wait_for(lambda: second.load()["running"] == 3, "three that run")
            second.process.send_signal(signal.SIGTERM)
            chunks = threads.submit(list, stream)
            check_refusals(second)
            assert not chunks.done(), "what runs went on meanwhile"
            assert chunks.result(120)[-1].usage.completion_tokens == length, "a running stream ends as it would have"
            streamed, whole = (response.result(120) for response in over_http)
            assert (streamed.status, streamed.events()[-1]) == (200, "[DONE]")
            assert sum(len(event["choices"]) for event in streamed.events()[:-1]) > 1
            assert streamed.events()[-2]["choices"][0]["finish_reason"] == "length"
            assert whole.json()["usage"]["completion_tokens"] == length
            assert second.process.wait(60) == 0
        assert alive(children) == []
        assert "Error" not in second.output
        assert "Traceback" not in second.output
        assert second.leftovers() == []
        [kept] = (tmp_path / "kept").glob("motley-*/logs")
        assert f"logs: {kept}" in second.output
        calls = [json.loads(line) for line in (kept / "access.log").read_text().splitlines()]
        assert {"http", "grpc"} == {each["protocol"] for each in calls}
        assert "draining" in {each["refusal"].get("code") for each in calls}
        assert list(kept.glob("serve/replica_*.log"))
    assert service.load()["running"] == 0


def test_the_page_of_each_replica_in_the_dashboard_shows_lines_of_its_log(service: Served) -> None:
    for name, lines in serve_api.replica_logs(service).items():
        assert any(" INFO motley." in line for line in lines), f"on the page of {name}"


def traced(collector: Collector) -> set[str]:
    """Names of the calls of which requests are known."""
    parents = {span.parent_span_id for span in collector.spans if span.name == "generate"}
    return {span.name for span in collector.spans if span.span_id in parents}


def check_refusals(service: Served) -> None:
    """While it drains: nothing new is taken over any protocol, and health says so."""
    request = {"prompt": "abc"}

    def late() -> Answer | None:
        response = asyncio.run(post(service.http_port, "/v1/completions", request))
        return response if response.status != 200 else None

    refused = wait_for(late, "the beginning of the drain")
    assert (refused.status, refused.json()["error"]["code"]) == (503, "draining")
    assert int(refused.headers["retry-after"]) >= 1
    streamed = asyncio.run(post(service.http_port, "/v1/completions", {**request, "stream": True}))
    assert (streamed.status, streamed.headers["retry-after"]) == (503, "1")
    with pytest.raises(HTTPError) as reported:
        service.load()
    assert (reported.value.code, reported.value.headers["retry-after"]) == (503, "1")
    with grpc.insecure_channel(service.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            inference_pb2_grpc.InferenceStub(channel).Complete(pb.CompleteRequest(text="abc"))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert dict(caught.value.trailing_metadata())["retry-after"] == "1"


def test_the_ready_file_says_where(service: Served) -> None:
    assert json.loads(json.dumps(service.endpoints)) == service.endpoints
    assert service.endpoints["pid"] == service.process.pid
    assert service.endpoints["model"] == "tiny"
    assert service.endpoints["proxy"].startswith("HAProxy 2.")
    private = Path(service.endpoints["folder"]).parent
    assert private.stat().st_mode & 0o077 == 0, "sockets and logs are for nobody else"
