"""Treatment of KServe's parameters that other servers have, and of those that nobody knows."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import asgi
import pytest
from echo_worker import EchoWorker
from local_ingress import make_ingress

from motley.cluster.api.common.fields.unknown_fields import ALWAYS_REFUSED, UnknownFieldPolicy
from motley.cluster.api.kserve.kserve_numbers import NUMBERS
from motley.cluster.api.kserve.kserve_request import InferRequest, grammar_bytes, parse_infer_request
from motley.cluster.api.kserve.kserve_sampling import SAMPLING_PARAMETERS
from motley.cluster.api.kserve.kserve_tensors import BOOL, BYTES, INT32, Tensor
from motley.cluster.service.deployment.ingress_config import IngressConfig
from motley.replicas.errors import InvalidRequest

TEXT = Tensor("text_input", BYTES, (1,), [b"abc"])
INFER, GENERATE = "/v2/models/echo/infer", "/v2/models/echo/generate"
INPUTS = [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["abc"]}]


def sampling(policy: Any = "refuse", **parameters: Any) -> dict[str, Any]:
    return dict(
        parse_infer_request(
            InferRequest(parameters=parameters, inputs=[TEXT]), UnknownFieldPolicy(policy)
        ).parsed.sampling
    )


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"n_predict": 5}, {"max_tokens": 5}),
        ({"n_probs": 1}, {"logprobs": 1}),
        ({"n_predict": "-2"}, {}),
        ({"num_predict": -1}, {}),
        ({"max_completion_tokens": 5, "max_tokens": 5}, {"max_tokens": 5}),
        ({"max_new_tokens": 5, "n_predict": 5}, {"max_tokens": 5}),
        ({"random_seed": 5}, {"seed": 5}),
        ({"stop_sequences": "x"}, {"stop": "x"}),
        ({"no_stop_trim": True}, {"include_stop_str_in_output": True}),
        ({"n_probs": 0, "typical_p": 1.0, "repeat_last_n": 64, "dry_base": 1.75, "num_ctx": 4096}, {}),
        ({"use_beam_search": False, "echo": False, "stream": False, "return_full_text": False}, {}),
        ({"sequence_id": 0, "sequence_start": False, "length_penalty": 2.0}, {}),
        ({"mood": "", "guided_regex": "", "mirostat": ""}, {}),
        ({"stop_words": "x", "min_length": 1, "end_id": 5}, {"stop": "x", "min_tokens": 1, "stop_token_ids": [5]}),
        ({"repeat_penalty": 1.0, "repeat_last_n": -1, "penalize_newline": True, "pad_id": 5, "beam_width": 1}, {}),
        ({"verbosity": "medium", "store": False, "safety_identifier": "me", "prompt_cache_key": "k"}, {}),
    ],
)
def test_names_of_others_are_taken_as_of_a_completion(parameters: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sampling(**parameters) == expected


def test_formats_have_their_older_names() -> None:
    schema = '{"type": "integer"}'
    assert sampling(guided_json=schema) == sampling(json_schema=schema)
    assert sampling(guided_choice='["a"]') == sampling(choice='["a"]')
    assert sampling(ebnf='root ::= "a"') == sampling(guided_grammar='root ::= "a"') == sampling(grammar='root ::= "a"')


@pytest.mark.parametrize(
    ("parameters", "begins", "code"),
    [
        ({"mirostat": 2}, "mirostat: 2 is not supported; give top_p or min_p", "unsupported_parameter"),
        ({"verbosity": "low"}, "verbosity: 'low' is not supported; leave it out, or give", "unsupported_parameter"),
        ({"audio": "x"}, "audio is not supported; the model writes text", "unsupported_parameter"),
        ({"n_indent": 4}, "n_indent: 4 is not supported; write the indentation", "unsupported_parameter"),
        ({"repeat_penalty": 1.1}, "repeat_penalty is not supported; /v1/completions has it", "unsupported_parameter"),
        ({"return_log_probs": 1}, "return_log_probs: 1 is not accepted; expected true or false", "invalid_value"),
        ({"guided_decoding": "{}"}, "guided_decoding is not supported; give json_schema", "unsupported_parameter"),
        ({"lora_name": "x"}, "lora_name is not supported; one model is served", "unsupported_parameter"),
        ({"end_id": 5, "stop_token_ids": "[6]"}, "end_id: 5 is not accepted; expected no value", "invalid_value"),
        ({"lora_path": "x"}, "lora_path is not supported; one model is served", "unsupported_parameter"),
        ({"echo": True}, "echo is not supported; /v1/completions has it", "unsupported_parameter"),
        ({"return_full_text": True}, "return_full_text is not supported", "unsupported_parameter"),
        ({"truncate": 5}, "truncate is not supported; /v1/completions has it", "unsupported_parameter"),
        ({"sequence_id": "a"}, "sequence_id: 'a' is not supported; send the whole", "unsupported_parameter"),
        ({"max_tokens": 5, "n_predict": 6}, "n_predict: 6 is not accepted; expected no value", "invalid_value"),
        ({"n_predict": 6, "max_tokens": 5}, "n_predict: 6 is not accepted; expected no value", "invalid_value"),
        ({"n_predict": 6, "num_predict": 5}, "num_predict: 5 is not accepted; expected no value", "invalid_value"),
        ({"stop_sequences": ["x"]}, "stop_sequences: ['x'] is not accepted", "invalid_value"),
        ({"guided_choice": "a"}, "guided_choice: 'a' is not accepted; expected a JSON list", "invalid_value"),
        ({"guided_json": 5}, "guided_json: expected a text", "invalid_value"),
        ({"guided_json": "true", "json_schema": "{}"}, "guided_json: give one of", "invalid_value"),
        ({"do_sample": False, "temperature": 0.5}, "do_sample: False is not accepted", "invalid_value"),
        ({"do_sample": 0}, "do_sample: 0 is not accepted; expected true or false", "invalid_value"),
        ({"stop": "a", "stop_words": "b"}, "stop_words: 'b' is not accepted; expected no value", "invalid_value"),
        ({"logprobs": 2, "n_probs": 1}, "n_probs: 1 is not accepted; expected no value", "invalid_value"),
        ({"best_of": 2}, "best_of is not supported; /v1/completions has it", "unsupported_parameter"),
        ({"timeout_s": 2}, "timeout_s is not supported; give timeout, in microseconds", "unsupported_parameter"),
        ({"options": {"top_k": 5}}, "options is not supported; give its fields as", "unsupported_parameter"),
    ],
)
def test_what_cannot_be_had_is_refused_by_the_clients_name(parameters: dict[str, Any], begins: str, code: str) -> None:
    for policy in ("ignore", "refuse"):
        with pytest.raises(InvalidRequest) as caught:
            sampling(policy, **parameters)
        assert caught.value.message.startswith(f"parameters.{begins}")
        assert caught.value.code == code


def test_what_nobody_knows_is_ignored_or_refused() -> None:
    assert sampling("ignore", mood=1, max_tokens=2) == {"max_tokens": 2}
    with pytest.raises(InvalidRequest, match=r"^parameters\.mood: there is no such field") as caught:
        sampling(mood=1)
    assert caught.value.code == "unknown_parameter"
    for name in ALWAYS_REFUSED:
        for policy in ("ignore", "refuse"):
            with pytest.raises(InvalidRequest, match="there is no such field"):
                sampling(policy, **{name: "mine"})


@pytest.fixture(scope="module")
async def posts(folder: Path, worker: EchoWorker) -> Any:
    """Posts to a service that ignores what nobody knows, and to one that refuses it."""
    ways = [IngressConfig(), IngressConfig(unknown_fields="refuse")]
    apps = [(await make_ingress(folder, worker, ingress_config=way)).__serve_build_asgi_app__() for way in ways]
    return [partial(asgi.request, app, "POST") for app in apps]


def bodies(parameters: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    """Route, body, and how it calls its parameters."""
    return [
        (INFER, {"inputs": INPUTS, "parameters": parameters}, "parameters."),
        (GENERATE, {"text_input": "abc", "parameters": parameters}, "parameters."),
        (GENERATE, {"text_input": "abc", **parameters}, ""),
    ]


async def test_over_http(posts: Any) -> None:
    lenient, strict = posts
    for path, body, prefix in bodies({"max_tokens": 2, "seed": 1, "mood": {"deep": [1]}}):
        assert (await lenient(path, body)).status == 200
        assert (await strict(path, body)).json()["error"].startswith(f"{prefix}mood: there is no such field")
    for path, body, _ in bodies({"n_predict": 2, "sampling_seed": 1, "mood": None, "other": [], "mirostat": 0}):
        for post in posts:
            reply = await post(path, body)
            assert (reply.status, reply.json()["parameters"]["completion_tokens"]) == (200, 2)
    for path, body, prefix in bodies({"mirostat": 2}):
        for post in posts:
            assert (await post(path, body)).json()["error"].startswith(f"{prefix}mirostat: 2 is not supported")
    for path, body, prefix in bodies({"n_predict": -7}):
        for post in posts:
            assert (await post(path, body)).json()["error"].startswith(f"{prefix}n_predict: -7 is not accepted")


def tensor(name: str, *elements: Any) -> Tensor:
    return Tensor(name, BYTES if isinstance(elements[0], bytes) else BOOL, (len(elements),), elements)


def together(**more: Any) -> dict[str, Any]:
    """The same fields as a parameter, as a parameter's text, and as a tensor."""
    values = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "3", "seed": None, "stop": ["x", "y"], **more}
    text = json.dumps(values)
    found = [
        dict(parse_infer_request(InferRequest(parameters=parameters, inputs=inputs)).parsed.sampling)
        for parameters, inputs in (
            ({SAMPLING_PARAMETERS: values}, [TEXT]),
            ({SAMPLING_PARAMETERS: text}, [TEXT]),
            ({}, [TEXT, tensor(SAMPLING_PARAMETERS, text.encode())]),
            ({SAMPLING_PARAMETERS: text, "temperature": "0.1"}, [TEXT, tensor(SAMPLING_PARAMETERS, text.encode())]),
        )
    ]
    assert all(one == found[0] for one in found)
    return found[0]


def test_what_tritons_vllm_backend_takes_in_one_object_counts_as_parameters() -> None:
    assert together() == {"temperature": 0.1, "top_p": 0.95, "max_tokens": 3, "stop": ["x", "y"]}
    more = together(
        stop_token_ids=[5], logit_bias={"5": 1}, bad_words=["a b"], lora_name=None, early_stopping=False, n="2"
    )
    assert (more["stop_token_ids"], more["logit_bias"], more["bad_words"], more["n"]) == ([5], {"5": 1}, ["a b"], 2)
    schema = {"type": "integer"}
    assert together(guided_json=schema)["grammar"].source == sampling(json_schema=json.dumps(schema))["grammar"].source
    for nothing in ("", "{}", {}, None):
        assert sampling(sampling_parameters=nothing) == {}


@pytest.mark.parametrize(
    ("parameters", "given", "begins"),
    [
        ({}, {"max_tokens": 0}, "max_tokens: 0 is not accepted"),
        ({}, {"max_tokens": [1]}, "max_tokens: [1] is not accepted"),
        ({}, {"mirostat": 2}, "mirostat: 2 is not supported"),
        ({}, {"lora_name": "x"}, "lora_name is not supported; one model is served"),
        ({}, {"mood": 1}, "mood: there is no such field"),
        ({}, {"priority": 5}, "priority is not supported; give it beside sampling_parameters"),
        ({}, {"timeout": 5}, "timeout is not supported; give it beside sampling_parameters"),
        ({}, {"sampling_parameters": {"top_k": 5}}, "sampling_parameters is not supported; give its fields as"),
        ({}, {"stop_token_ids": 5}, "stop_token_ids: "),
        ({"max_tokens": 4}, {"max_tokens": 5}, "max_tokens: 5 is not accepted; expected no value beside "),
        ({"n_predict": 4}, {"max_tokens": 5}, "max_tokens: 5 is not accepted; expected no value beside "),
        ({}, "{", " is not JSON"),
        ({}, '{"top_k": 1, "top_k": 2}', "top_k"),
        ({}, "[1]", " is not a JSON object"),
    ],
    ids=repr,
)
async def test_what_is_wrong_in_that_object_is_named_with_it(
    parameters: dict[str, Any], given: Any, begins: str, posts: Any
) -> None:
    _, strict = posts
    text = given if isinstance(given, str) else json.dumps(given)
    input_ = {"name": SAMPLING_PARAMETERS, "shape": [1], "datatype": "BYTES", "data": [text]}
    for path, body, prefix in (
        (INFER, {"inputs": [*INPUTS, input_], "parameters": parameters}, ""),
        (INFER, {"inputs": INPUTS, "parameters": {**parameters, SAMPLING_PARAMETERS: text}}, "parameters."),
        (GENERATE, {"text_input": "abc", "parameters": {**parameters, SAMPLING_PARAMETERS: text}}, "parameters."),
        (GENERATE, {"text_input": "abc", **parameters, SAMPLING_PARAMETERS: text}, ""),
        (f"{GENERATE}_stream", {"text_input": "abc", **parameters, SAMPLING_PARAMETERS: text}, ""),
    ):
        reply = await strict(path, body)
        assert reply.status == 400
        said = reply.json()["error"]
        if parameters and path != INFER:
            assert said == f"{prefix}{SAMPLING_PARAMETERS}.max_tokens: given twice"
        elif begins == "top_k":
            assert "top_k" in said
        else:
            dot = "" if begins.startswith(" ") else "."
            assert said.startswith(f"{prefix}{SAMPLING_PARAMETERS}{dot}{begins}"), (path, said)


async def test_the_text_ends_where_that_object_says_it_does(posts: Any) -> None:
    text = json.dumps({"max_tokens": "3", "temperature": 0})
    for post in posts:
        for given in (text, json.loads(text)):
            for body in ({SAMPLING_PARAMETERS: given}, {"parameters": {SAMPLING_PARAMETERS: given}}):
                reply = await post(GENERATE, {"text_input": "abc", **body})
                assert (reply.status, reply.json()["text_output"]) == (200, "abc")
                events = (await post(f"{GENERATE}_stream", {"text_input": "abc", **body})).events()
                assert "".join(event["text_output"] for event in events) == "abc"


def test_inputs_of_tritons_vllm_backend() -> None:
    """Its sample client sends `stream`, the object above, and the same values as parameters, all as text."""

    def parsed(*more: Tensor) -> Any:
        return parse_infer_request(InferRequest(inputs=[TEXT, *more], parameters={"max_tokens": "3"}))

    assert parsed(tensor("stream", True)).streaming
    assert not parsed(tensor("stream", False), tensor("exclude_input_in_output", True)).streaming
    for wrong, begins in (
        ((tensor("exclude_input_in_output", False),), "exclude_input_in_output: False is not supported"),
        ((tensor("stream", True), tensor("streaming", False)), "stream: True is not accepted"),
        ((tensor(SAMPLING_PARAMETERS, b"\xff"),), "sampling_parameters: it is not UTF-8"),
        ((tensor(SAMPLING_PARAMETERS, b"{}", b"{}"),), "sampling_parameters: shape [2] is not accepted"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            parsed(*wrong)
        assert caught.value.message.startswith(begins)


def test_log_probabilities_in_the_words_of_tensorrt_llm() -> None:
    assert sampling(return_log_probs=True) == {"logprobs": 0}
    assert sampling(return_log_probs=True, logprobs=2) == sampling(logprobs=2, return_log_probs=True) == {"logprobs": 2}
    assert sampling(return_log_probs=False) == {}


def inputs_of(*inputs: Tensor, **parameters: Any) -> dict[str, Any]:
    return dict(parse_infer_request(InferRequest(parameters=parameters, inputs=[TEXT, *inputs])).parsed.sampling)


async def test_the_same_said_twice_is_taken(posts: Any) -> None:
    strings, ids = tensor("stop", b"a"), Tensor("stop_token_ids", INT32, (1,), [5])
    assert inputs_of(strings, stop="a") == {"stop": "a"}
    assert inputs_of(strings, sampling_parameters={"stop": ["a"]}) == {"stop": ["a"]}
    assert inputs_of(ids, stop_token_ids="[5]") == inputs_of(ids, end_id=5) == {"stop_token_ids": [5]}
    assert inputs_of(Tensor("stop", BYTES, (0,), []), stop="a") == {"stop": "a"}
    assert sampling(stop="a", sampling_parameters={"stop": ["a"]}) == {"stop": "a"}
    assert sampling(end_id=5, stop_token_ids="[5]") == {"stop_token_ids": [5]}
    assert sampling(return_log_probs=True, sampling_parameters={"logprobs": 2}) == {"logprobs": 2}
    assert sampling(logprobs=2, sampling_parameters={"return_log_probs": True}) == {"logprobs": 2}
    assert sampling(guided_json="{}", json_schema="{}") == sampling(json_schema="{}")
    for wrong, parameters in ((strings, {"stop": "b"}), (ids, {"stop_token_ids": "[6]"})):
        with pytest.raises(InvalidRequest, match=rf"^{wrong.name}: .* is not accepted; expected no value beside param"):
            inputs_of(wrong, **parameters)
    for path, body, _ in bodies({"max_tokens": -1, "n_predict": 2, "sampling_parameters": {"max_new_tokens": "-1"}}):
        for post in posts:
            reply = await post(path, body)
            assert (reply.status, reply.json()["parameters"]["completion_tokens"]) == (200, 2)


@pytest.mark.parametrize("text", ["1e-05", "5e-1", ".5", "1.", "0.30000000000000004", "1e0", "0", "-0.0", "1E-3"])
def test_numbers_in_text_are_those_that_python_writes(text: str) -> None:
    assert sampling(temperature=text) == {"temperature": float(text)}
    assert sampling(sampling_parameters={"min_p": text}) == {"min_p": float(text)}


@pytest.mark.parametrize("value", [-3, 0, 1, 7, 2**31 - 1])
def test_each_number_may_be_text(value: int) -> None:
    for name in sorted(NUMBERS - {"end_id", "priority", "timeout", "logprobs"} | {"random_seed", "n_predict"}):
        assert sampling(**{name: str(value)}) == sampling(**{name: value})
    asked = InferRequest(parameters={"priority": "7", "timeout": "2000000"}, inputs=[TEXT])
    parsed = parse_infer_request(asked).parsed
    assert (parsed.priority, parsed.timeout_s) == (43, 2.0)
    assert sampling(end_id="5") == {"stop_token_ids": [5]}


@pytest.mark.parametrize(
    "parameters",
    [
        {"best_of": 1}, {"best_of": "1"}, {"bad_words": ""}, {"bad_words": "[]"}, {"bad_words": '[""]'},
        {"regex": "", "json_schema": "", "grammar": "", "structural_tag": "", "choice": ""},
        {"stop_token_ids": "", "allowed_token_ids": "", "logit_bias": "", "logprobs": False}, {"typical_p": "1.0"},
        {"repeat_penalty": "1.0", "repeat_last_n": "64", "beam_width": "1", "top_logprobs": "0"},
        {"sampling_parameters": {"priority": 0, "timeout": 0, "bad_words": [""], "stop": [], "logit_bias": {}}},
        {"response_format": {"type": "text"}, "stream_options": {"include_usage": False}},
        {"do_sample": True}, {"temperature": None, "timeout": None, "priority": None, "binary_data_output": None},
        {"structured_outputs": True, "return_logprob": False, "stream": False, "length_penalty": 2.0},
    ],
    ids=repr,
)  # fmt: skip
async def test_what_asks_for_nothing_is_taken(posts: Any, parameters: dict[str, Any]) -> None:
    """Over `infer` and over `generate`."""
    for path, body, _ in bodies({"max_tokens": 1, **parameters}):
        if path == INFER or "binary_data_output" not in parameters:
            for post in posts:
                reply = await post(path, body)
                assert reply.status == 200, reply.body


async def test_what_is_no_number_is_refused_as_it_was_written(posts: Any) -> None:
    for text in ("nan", "inf", "1e400", "", " 1", "1_0", "0x1", "1e", "."):
        for path, body, prefix in bodies({"temperature": text}):
            said = (await posts[0](path, body)).json()["error"]
            assert said.startswith(f"{prefix}temperature: {text!r} is not accepted")


async def test_false_as_do_sample_is_greedy(posts: Any) -> None:
    """OpenAI's protocol does the same."""
    for given in ({}, {"temperature": 1}, {"temperature": "0"}, {"sampling_parameters": {"temperature": 1.0}}):
        assert sampling(do_sample=False, **given) == {"temperature": 0}
    assert sampling(do_sample=True, temperature=0.5) == {"temperature": 0.5}
    for path, body, prefix in bodies({"do_sample": False, "temperature": 0.5}):
        for post in posts:
            assert (await post(path, body)).json()["error"].startswith(f"{prefix}do_sample: False is not accepted")
    for path, body, _ in bodies({"sampling_parameters": {"do_sample": False}, "max_tokens": 1}):
        assert (await posts[0](path, body)).status == 200


def test_an_escape_hides_no_grammar() -> None:
    text = r'{"guided_jso\u006e": {"title": "x"}}'
    for inputs, parameters in (([tensor(SAMPLING_PARAMETERS, text.encode())], {}), ([], {SAMPLING_PARAMETERS: text})):
        assert grammar_bytes(InferRequest(parameters=parameters, inputs=[TEXT, *inputs])) == len(text)
        assert parse_infer_request(InferRequest(parameters=parameters, inputs=[TEXT, *inputs])).parsed.sampling[
            "grammar"
        ]


def test_minus_one_is_no_bound() -> None:
    assert sampling(max_tokens=-1) == sampling(max_tokens="-1") == sampling(max_tokens=-1, n_predict=-1) == {}
    assert sampling(max_tokens=-1, n_predict=5) == sampling(n_predict=5, max_tokens=-1) == {"max_tokens": 5}


def test_a_grammar_is_counted_under_each_of_its_names() -> None:
    """A long one is checked apart, so that others do not wait for it."""
    schema = json.dumps({"type": "object", "title": "x" * 1000})
    for name in ("json_schema", "guided_json"):
        inner = json.dumps({name: schema})
        assert grammar_bytes(InferRequest(parameters={name: schema}, inputs=[TEXT])) == len(schema)
        for given in (inner, json.loads(inner)):
            assert grammar_bytes(InferRequest(parameters={SAMPLING_PARAMETERS: given}, inputs=[TEXT])) == len(inner)
        as_tensor = tensor(SAMPLING_PARAMETERS, inner.encode())
        assert grammar_bytes(InferRequest(inputs=[TEXT, as_tensor])) == len(inner)
    assert grammar_bytes(InferRequest(parameters={SAMPLING_PARAMETERS: '{"top_k": 5}'}, inputs=[TEXT])) == 0
