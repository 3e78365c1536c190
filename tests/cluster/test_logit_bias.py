"""`logit_bias` as llama.cpp has it beside OpenAI's object: pairs of a token's id or a text, and a bias or false."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import asgi
import pytest
from bad_requests import refused
from local_ingress import make_ingress
from scripted_worker import ScriptedWorker

from motley.cluster.api.common.logit_bias import MAX_TEXT_CHARS, bias_by_token
from motley.replicas.errors import InvalidRequest
from motley.replicas.types import Delta, FinishReason, StreamMessage

PATHS = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}
END = StreamMessage((Delta(0, (65,), "a", None, FinishReason.LENGTH),), cached_tokens=0)


async def letters(text: str) -> list[int]:
    return [ord(char) for char in text]


async def test_biases_of_a_token_are_added_up_and_false_stays() -> None:
    pairs = [[5, 1.5], ["aba", 2], [ord("b"), -0.5], [7, False], [7, 3], ["7", 1], [9, 1], ["\t", False]]
    found = await bias_by_token(pairs, letters)
    assert found == {5: 1.5, ord("a"): 4, ord("b"): 1.5, 7: False, ord("7"): 1, 9: False}
    assert found[7] is found[9] is False
    assert await bias_by_token([], letters) == {}


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([1], "1 is not accepted; expected pairs"),
        ([[1]], r"\[1\] is not accepted; expected pairs"),
        ([[1, 2, 3]], "expected pairs"),
        ([{"1": 2}], "expected pairs"),
        ([[True, 1]], "True is not accepted; expected a token id or a text"),
        ([[1.0, 1]], "1.0 is not accepted; expected a token id or a text"),
        ([[[1], 1]], "expected a token id or a text"),
        ([[1, True]], "True is not accepted; expected a number, or false"),
        ([[1, "2"]], "expected a number, or false"),
        ([[1, None]], "expected a number, or false"),
        ([["", 1]], "expected texts of 1 to 256 characters"),
        ([["x" * (MAX_TEXT_CHARS + 1), 1]], "expected texts of 1 to 256 characters"),
        ([[1, 1]] * 301, "expected at most 300 pairs"),
    ],
)
async def test_what_is_no_pair_is_refused(pairs: list[Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        await bias_by_token(pairs, letters)
    assert (caught.value.param, caught.value.code) == ("logit_bias", "invalid_value")


@pytest.fixture(scope="module")
async def served(folder: Path) -> Any:
    """Tokens here are bytes, and special ones."""
    worker = ScriptedWorker(str(folder), [END])
    return worker, partial(asgi.request, (await make_ingress(folder, worker)).__serve_build_asgi_app__(), "POST")


async def test_pairs_reach_the_replica_by_token(served: Any) -> None:
    worker, post = served
    ids = worker._tokenizer.encode("hé", add_special_tokens=False)
    end = worker._tokenizer.encode("<|im_end|>", add_special_tokens=False, parse_special=False)
    assert not set(end) & worker._tokenizer.special_ids
    cases: list[tuple[Any, dict[int, float]]] = [
        ([[5, 1], ["hé", -2.5], [6, False]], {5: 1.0, **dict.fromkeys(ids, -2.5), 6: False}),
        ({"5": 1, "6": False}, {5: 1.0, 6: False}),
        ([["<|im_end|>", False]], dict.fromkeys(end, False)),
        ([], {}),
    ]
    for path, body in PATHS.items():
        for given, expected in cases:
            for more in ({"logit_bias": given}, {"options": {"logit_bias": given}}):
                reply = await post(path, {**body, **more})
                assert reply.status == 200, reply.body
                found = worker.requests[-1].sampling.logit_bias
                assert found == expected
                assert [token for token, bias in found.items() if bias is False] == [
                    token for token, bias in expected.items() if bias is False
                ]


async def test_pairs_over_kserve(served: Any) -> None:
    worker, post = served
    pairs = [[5, 1], ["h", False]]
    h = worker._tokenizer.encode("h", add_special_tokens=False)[0]
    generate = {"text_input": "abc", "max_tokens": 1}
    inputs = [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["abc"]}]
    for path, body in (
        ("generate", {**generate, "logit_bias": pairs}),
        ("generate", {**generate, "parameters": {"logit_bias": json.dumps(pairs)}}),
        ("infer", {"inputs": inputs, "parameters": {"max_tokens": 1, "logit_bias": json.dumps(pairs)}}),
    ):
        reply = await post(f"/v2/models/echo/{path}", body)
        assert reply.status == 200, reply.body
        assert worker.requests[-1].sampling.logit_bias == {5: 1.0, h: False}
        wrong = json.loads(json.dumps(body).replace("[5, 1]", "[5]"))
        assert "logit_bias: [5] is not accepted" in (await post(f"/v2/models/echo/{path}", wrong)).json()["error"]


@pytest.mark.parametrize(
    "given",
    [[[259, 1]], [[-1, 1]], [[5, 100.5]], [["aa", 60]], [[5, 60], [5, 60]], [[5, True]], {"5": True}, {"h": 1}, "5", 5],
    ids=json.dumps,
)
async def test_ids_and_numbers_have_their_range(given: Any, served: Any) -> None:
    for path, body in PATHS.items():
        error = refused(await served[1](path, {**body, "logit_bias": given}))
        assert (error["param"], error["code"]) == ("logit_bias", "invalid_value")
