"""Every valid request means the same over every protocol; any request is admitted, or refused with a field's name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from any_values import ANY, GIVEN, INT32, SAMPLING, VALID, outside
from echo_worker import EchoWorker
from hypothesis import example, given, settings
from hypothesis import strategies as st
from local_ingress import make_ingress

from motley.cluster.api.common.admission import MAX_TIMEOUT_S, RequestAdmitter
from motley.cluster.api.common.fields.json_body import parse_body
from motley.cluster.api.common.fields.unknown_fields import UnknownFieldPolicy
from motley.cluster.api.common.parsed_request import AdmittedRequest, ParsedRequest
from motley.cluster.api.kserve import kserve_messages, kserve_request
from motley.cluster.api.kserve.rest import kserve_json
from motley.cluster.api.motley import motley_messages
from motley.cluster.api.openai import openai_request
from motley.cluster.api.vllm import vllm_request
from motley.cluster.protos import inference_pb2, kserve_pb2, vllm_engine_pb2
from motley.cluster.transport.caller import Caller
from motley.replicas.errors import DeadlineExceeded, InvalidRequest, MotleyError, NotFound
from motley.replicas.sampling_params import SamplingParams

Fields = dict[str, Any]
EXACT = [field.name for field in fields(SamplingParams) if field.name != "grammar"]


def chosen(params: SamplingParams) -> Fields:
    """Return the fields that differ from the defaults, as a client would say them."""
    neutral = SamplingParams()
    return {name: getattr(params, name) for name in EXACT if getattr(params, name) != getattr(neutral, name)}


def over_motley(given_fields: Fields) -> Fields:
    written = inference_pb2.SamplingParams(**given_fields).SerializeToString()
    return motley_messages.parse_sampling(inference_pb2.SamplingParams.FromString(written))


def over_vllm(given_fields: Fields) -> Fields:
    wanted = vllm_engine_pb2.SamplingParams(**{"skip_special_tokens": True, **given_fields})
    request = vllm_engine_pb2.GenerateRequest(text="a", sampling_params=wanted)
    return dict(
        vllm_request.parse_generate_request(
            vllm_engine_pb2.GenerateRequest.FromString(request.SerializeToString())
        ).sampling
    )


def for_vllm(valid: Fields) -> Fields:
    """Its numbers have 32 bits, so of those that people write; its k is not negative, its seed has 32 bits too.

    It has no words for two fields, and answers with ids, so that where the text ends is the client's own affair.
    """
    others = ("include_stop_str_in_output", "allowed_token_ids", "bad_words")
    valid = {name: value for name, value in valid.items() if name not in others}
    fitted = {name: _rounded(name, value) for name, value in valid.items()}
    fitted |= {"logit_bias": {token: round(bias, 3) for token, bias in valid.get("logit_bias", {}).items()}}
    fitted |= {"top_k": max(valid.get("top_k", 0), 0)}
    return fitted | {"seed": None if valid.get("seed") is None else valid["seed"] % INT32}


def _rounded(name: str, value: Any) -> Any:
    above = 0.001 if name in ("top_p", "repetition_penalty") else -100.0
    return max(round(value, 3), above) if isinstance(value, float) else value


def over_kserve(given_fields: Fields) -> Fields:
    request = kserve_pb2.ModelInferRequest()
    for name, datatype, elements in _tensors(given_fields):
        tensor = request.inputs.add(name=name, datatype=datatype, shape=[len(elements)])
        contents = tensor.contents.bytes_contents if datatype == "BYTES" else tensor.contents.int64_contents
        contents.extend([one.encode() for one in elements] if datatype == "BYTES" else elements)
    for name, value in _parameters(given_fields).items():
        kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
        setattr(request.parameters[name], kinds[type(value)], value)
    read = kserve_messages.infer_request(kserve_pb2.ModelInferRequest.FromString(request.SerializeToString()))
    return dict(kserve_request.parse_infer_request(read).parsed.sampling)


def over_kserve_json(given_fields: Fields) -> Fields:
    inputs = [
        {"name": name, "datatype": datatype, "shape": [len(elements)], "data": elements}
        for name, datatype, elements in _tensors(given_fields)
    ]
    body = json.dumps({"inputs": inputs, "parameters": _parameters(given_fields)}).encode()
    return dict(kserve_request.parse_infer_request(kserve_json.infer_request(body, "echo", "")).parsed.sampling)


def over_completions(given_fields: Fields) -> Fields:
    echo = "prompt_logprobs" in given_fields
    body = {name: value for name, value in given_fields.items() if name != "prompt_logprobs"}
    sent = json.dumps({"prompt": "a", "echo": echo, **body}).encode()
    read = dict(openai_request.parse_completion(parse_body(sent)).requests[0].sampling)
    return read if echo else {**read, "prompt_logprobs": None}


def for_completions(valid: Fields) -> Fields:
    """The prompt's log-probabilities are asked for by echo: as many as the answer's."""
    return valid | {"prompt_logprobs": None if valid.get("prompt_logprobs") is None else valid.get("logprobs")}


def for_chat(valid: Fields) -> Fields:
    return valid | {"prompt_logprobs": None}


def over_chat(given_fields: Fields) -> Fields:
    body = dict(given_fields)
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    if "max_tokens" in body:
        body["max_completion_tokens"] = body.pop("max_tokens")
    sent = json.dumps({"messages": [{"role": "user", "content": "a"}], **body}).encode()
    return dict(openai_request.parse_chat(parse_body(sent), lambda _: None, UnknownFieldPolicy()).requests[0].sampling)


def _tensors(given_fields: Fields) -> Iterator[tuple[str, str, list[Any]]]:
    yield "text_input", "BYTES", ["a"]
    for name, datatype in (("stop", "BYTES"), ("stop_token_ids", "INT64")):
        if name in given_fields:
            yield name, datatype, list(given_fields[name])


def _parameters(given_fields: Fields) -> Fields:
    written = {name: value for name, value in given_fields.items() if name not in ("stop", "stop_token_ids")}
    as_json = ("logit_bias", "allowed_token_ids", "bad_words")
    return written | {name: json.dumps(written[name]) for name in as_json if name in written}


Way = Callable[[Fields], Fields]
WAYS: list[tuple[Way, Way]] = [
    (over_motley, dict), (over_vllm, for_vllm), (over_kserve, dict), (over_kserve_json, dict),
    (over_completions, for_completions), (over_chat, for_chat),
]  # fmt: skip


@pytest.mark.parametrize(("way", "fit"), WAYS, ids=lambda way: way.__name__)
@given(valid=VALID)
@settings(max_examples=60, derandomize=True)
def test_what_is_valid_arrives_as_it_was(way: Way, fit: Way, valid: Fields) -> None:
    params = SamplingParams(**fit(valid | {"grammar": None}))
    read = {name: value for name, value in way(chosen(params)).items() if value is not None}
    assert SamplingParams(**read) == params


@pytest.fixture(scope="module")
def admit(folder: Path) -> Iterator[Callable[[ParsedRequest], AdmittedRequest | MotleyError]]:
    loop = asyncio.new_event_loop()
    door: RequestAdmitter = loop.run_until_complete(make_ingress(folder, EchoWorker(str(folder)))).admitter

    def call(ask: ParsedRequest) -> AdmittedRequest | MotleyError:
        try:
            return loop.run_until_complete(door.admit(ask, Caller()))
        except (InvalidRequest, NotFound, DeadlineExceeded) as refusal:
            return refusal

    yield call
    loop.close()


PROMPTS = st.text(max_size=9) | st.lists(st.integers(-1, 259), max_size=9) | ANY
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.just("user") | ANY, "content": st.text(max_size=5) | ANY}) | ANY)
ASKS = st.fixed_dictionaries(
    {"prompt": PROMPTS},
    optional={
        "model": st.just("echo") | ANY,
        "timeout_s": st.floats(1, 100) | ANY,
        "priority": st.integers(-5, 5) | ANY,
        "output_ids": st.lists(st.lists(st.integers(0, 258) | ANY, max_size=3), max_size=2),
        "parse_special": st.booleans(),
        "default_max_tokens": st.none() | st.integers(1, 20),
    },
)
CHATS = st.fixed_dictionaries({"prompt": MESSAGES, "chat": st.just(True)})
NAMES = {"prompt", "model", "timeout_s", "priority", "output_ids", *SAMPLING}


@pytest.mark.slow("200 drawn requests with fields of any value go through the door")
@given(ask=ASKS | CHATS, sampling=GIVEN)
@settings(max_examples=200, derandomize=True)
@example({"prompt": "a", "timeout_s": 10**400}, {})
@example({"prompt": "a", "priority": 10**5000}, {})
@example({"prompt": {65: 1}}, {})
@example({"prompt": 7}, {})
@example({"prompt": b"abc"}, {})
@example({"prompt": [10**5000]}, {})
def test_a_request_is_admitted_or_refused_with_a_field(
    admit: Callable[[ParsedRequest], Any], ask: Fields, sampling: Fields
) -> None:
    found = admit(ParsedRequest(**{"model": "echo", **ask}, sampling=sampling))
    if isinstance(found, MotleyError):
        assert found.param in NAMES or (found.param or "").startswith("messages"), found
        assert len(found.message) < 600
        return
    request = found.request
    assert outside(request.sampling) == []
    assert request.sampling.seed is not None
    assert all(type(token) is int and 0 <= token < 259 for token in request.prompt_ids)
    assert request.deadline_s is None or 0 < request.deadline_s <= MAX_TIMEOUT_S
    assert type(request.priority) is int
    assert len(request.prompt_ids) + (request.sampling.max_tokens or 0) <= 512
    assert len(request.output_ids) in (0, request.sampling.n)
