"""`GET /metrics` on the whole ingress, in one process: each request changes what it should, by one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asgi
import pytest
from echo_worker import EchoWorker
from local_ingress import make_ingress
from prometheus_client.parser import text_string_to_metric_families

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.routing.ingress_counters import IngressCounters, PoolCounters
from motley.cluster.security.auth.api_keys import Scope, StoredKey, hash_key
from motley.cluster.security.auth.key_file import write_keys
from motley.cluster.service.deployment.ingress_config import IngressConfig
from motley.cluster.transport.call_errors import CallErrors
from motley.replicas.host.metric_fields import metrics_of

COMPLETIONS = "/v1/completions"
Samples = Counter[str]


async def scraped(call: Callable[..., Any]) -> Samples:
    """Return the value of each sample by its name and its own labels."""
    reply = await call("GET", "/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain; version=")
    found: Samples = Counter()
    for family in text_string_to_metric_families(reply.body.decode()):
        for sample in family.samples:
            own = [value for key, value in sample.labels.items() if key not in ("model_name", "pool")]
            found[" ".join([sample.name.removeprefix("motley_"), *own])] += sample.value  # type: ignore[assignment]
    return found


async def grown(call: Callable[..., Any], act: Callable[[], Any]) -> dict[str, float]:
    """Return what an action adds to counters, without the buckets of histograms."""
    before = await scraped(call)
    await act()
    after = await scraped(call)
    return {
        name: after[name] - before[name]
        for name in after
        if after[name] != before[name] and "_bucket" not in name and not name.endswith("_seconds_sum")
    }


def times(**counts: int) -> dict[str, int]:
    return {f"{name}_seconds_count": count for name, count in counts.items() if count}


async def test_all_of_an_ingress_is_there_from_the_start(call: Any) -> None:
    reply = await call("GET", "/metrics")
    names = {family.name.removeprefix("motley_") for family in text_string_to_metric_families(reply.body.decode())}
    own = (IngressCounters, PoolCounters, CallErrors)
    assert names == {metric.name for kind in own for metric in metrics_of(kind).values()}


async def test_a_completion_of_several_choices(call: Any, post: Any) -> None:
    found = await grown(call, lambda: post(COMPLETIONS, {"prompt": "abc", "max_tokens": 5, "n": 2}))
    assert found == {
        "requests_total": 1, "prompt_tokens_total": 3, "generation_tokens_total": 10,
        "request_success_total length": 2, "request_prompt_tokens_count": 1, "request_prompt_tokens_sum": 3,
        "request_generation_tokens_count": 1, "request_generation_tokens_sum": 10,
        **times(e2e_request_latency=1, request_routing_time=1),
    }  # fmt: skip


async def test_a_stream_has_gaps_and_a_first_token(call: Any, post: Any) -> None:
    found = await grown(call, lambda: post(COMPLETIONS, {"prompt": "abc", "max_tokens": 4, "stream": True}))
    assert found == {
        "requests_total": 1, "prompt_tokens_total": 3, "generation_tokens_total": 4,
        "request_success_total length": 1, "request_prompt_tokens_count": 1, "request_prompt_tokens_sum": 3,
        "request_generation_tokens_count": 1, "request_generation_tokens_sum": 4,
        **times(
            e2e_request_latency=1, request_routing_time=1, time_to_first_token=1, inter_token_latency=3,
            request_time_per_output_token=1,
        ),
    }  # fmt: skip


async def test_prompts_of_one_call_are_requests_of_their_own(call: Any, post: Any) -> None:
    found = await grown(call, lambda: post(COMPLETIONS, {"prompt": ["ab", "xyz"], "max_tokens": 2}))
    assert (found["requests_total"], found["prompt_tokens_total"], found["generation_tokens_total"]) == (2, 5, 4)


async def test_an_embedding_has_a_prompt_and_no_output(call: Any, post: Any) -> None:
    found = await grown(call, lambda: post("/v1/embeddings", {"input": "abc"}))
    assert found == {
        "requests_total": 1, "prompt_tokens_total": 3, "request_success_total stop": 1,
        "request_prompt_tokens_count": 1, "request_prompt_tokens_sum": 3, "request_generation_tokens_count": 1,
        **times(request_routing_time=1),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "code"),
    [({"prompt": "a", "n": 0}, "invalid_value"), ({"prompt": 7}, "invalid_value"), ({}, "missing_field")],
)
async def test_a_refusal_is_counted_by_its_code_and_is_no_request(call: Any, post: Any, body: Any, code: str) -> None:
    assert await grown(call, lambda: post(COMPLETIONS, body)) == {f"request_refusals_total {code}": 1}


async def test_a_call_over_grpc_counts_alike(call: Any, stub: Any) -> None:
    sampling = pb.SamplingParams(max_tokens=3)
    found = await grown(call, lambda: stub.Complete(pb.CompleteRequest(text="abc", sampling=sampling)))
    assert (found["requests_total"], found["prompt_tokens_total"], found["generation_tokens_total"]) == (1, 3, 3)
    wrong = pb.CompleteRequest(text="abc", sampling=pb.SamplingParams(temperature=-1.0))

    async def refused() -> None:
        await asyncio.gather(stub.Complete(wrong), return_exceptions=True)

    assert await grown(call, refused) == {"request_refusals_total invalid_value": 1}


async def test_a_client_that_leaves_is_an_abort(call: Any, ingress: Any, stub: Any) -> None:
    async def leave() -> None:
        stream = stub.CompleteStream(pb.CompleteRequest(text="abc", sampling=pb.SamplingParams(max_tokens=500)))
        await stream.read()
        await stream.read()
        stream.cancel()
        while ingress.router.num_streams:
            await asyncio.sleep(0.001)

    found = await grown(call, leave)
    assert {name: value for name, value in found.items() if "success" in name} == {"request_success_total abort": 1}
    assert found["e2e_request_latency_seconds_count"] == 1


async def test_head_has_no_body(call: Any) -> None:
    assert (await call("HEAD", "/metrics")).status == 200


KEYS: dict[str, Scope] = {"mk-alice": "", "mk-ops": "admin", "mk-prometheus": "metrics"}


@pytest.mark.parametrize("open_metrics", [False, True])
async def test_keys(folder: Path, worker: EchoWorker, tmp_path: Path, open_metrics: bool) -> None:
    write_keys(tmp_path / "keys.yaml", [StoredKey(key[3:], hash_key(key), scope=KEYS[key]) for key in KEYS])
    config = IngressConfig(api_keys=tmp_path / "keys.yaml", open_metrics=open_metrics, vllm_metrics=True)
    app = (await make_ingress(folder, worker, ingress_config=config)).__serve_build_asgi_app__()

    async def status(path: str, key: str = "", **more: str) -> int:
        headers = {"authorization": f"Bearer {key}", **more} if key else more
        return int((await asgi.request(app, "GET", path, headers=headers)).status)

    assert [await status("/metrics", key) for key in KEYS] == [403, 200, 200]
    assert [await status("/v1/models", key) for key in KEYS] == [200, 401, 401]
    assert await status("/metrics") == (200 if open_metrics else 401)
    assert await status("/metrics", **{"x-forwarded-for": "10.0.0.1"}) == 401
    assert await status("/v1/models") == 401
    text = (await asgi.request(app, "GET", "/metrics", headers={"x-api-key": "mk-prometheus"})).body.decode()
    assert "\nmotley_requests_total{" in text
    assert "\nvllm:request_success_total{" in text
    assert "alice" not in text, "no tenant's name"
