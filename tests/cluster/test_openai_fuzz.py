"""Whatever JSON comes, the translators answer with a call or with a refusal that has a name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from motley.cluster.api.common.fields import field_table
from motley.cluster.api.common.fields.body_shapes import normalize_body
from motley.cluster.api.common.fields.foreign_fields import FOREIGN_FIELDS
from motley.cluster.api.common.fields.json_body import parse_body
from motley.cluster.api.common.fields.unknown_fields import UnknownFieldPolicy
from motley.cluster.api.openai import openai_request
from motley.cluster.api.openai.openai_request import OpenAIRequest
from motley.cluster.api.openai.openai_request_schemas import BODY_SHAPES
from motley.replicas.errors import InvalidRequest

TABLES = {
    "prompt": field_table.fields_by_name(field_table.COMPLETION),
    "messages": field_table.fields_by_name(field_table.CHAT),
}
NAMES = sorted({*TABLES["prompt"], *TABLES["messages"]})
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "name", "refusal", "tool_calls", "reasoning", "other"]), JSON, max_size=4
    ),
    max_size=2,
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function") | JSON},
        optional={"function": st.dictionaries(st.sampled_from(["name", "parameters", "strict", "other"]), JSON) | JSON},
    ),
    max_size=2,
)
BODIES = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), JSON | MESSAGES | TOOLS, max_size=5)


@given(BODIES)
@example({"prompt": "a", "output_ids": []})
@example({"messages": [{"role": "user", "content": "a"}], "function_call": "none"})
def test_bodies(body: dict[str, Any]) -> None:
    for needed, translate in (("prompt", openai_request.parse_completion), ("messages", chat_call)):
        call, refusal = outcome(lambda translate=translate: translate(parse_body(json.dumps(body).encode())))
        if refusal is not None:
            assert refusal.param is not None
            assert refusal.code
        else:
            assert isinstance(call, OpenAIRequest)
            assert body[needed] is not None
            for name, value in body.items():
                field = TABLES[needed][name]
                assert field.instead is None or value in (None, *field.neutral)


FOREIGN_NAMES = sorted({one.name for one in FOREIGN_FIELDS if not one.at})
SETTLED = st.dictionaries(st.sampled_from(FOREIGN_NAMES) | st.sampled_from(NAMES), JSON | st.sampled_from([-1, 0, 1]))


@given(SETTLED | st.builds(lambda inner, body: {**body, "options": inner}, SETTLED, SETTLED))
@example({"options": {"options": {}}, "parameters": {"n_predict": -1}, "n_predict": -1, "num_predict": 3})
def test_bodies_of_others(body: dict[str, Any]) -> None:
    plain = {"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}
    for one, route, translate in zip(
        plain, ("completion", "chat"), (openai_request.parse_completion, chat_call), strict=True
    ):
        sent = json.dumps({**body, **one}).encode()

        def read(
            sent: bytes = sent, route: str = route, translate: Callable[..., OpenAIRequest] = translate
        ) -> OpenAIRequest:
            return translate(normalize_body(parse_body(sent), BODY_SHAPES[route], UnknownFieldPolicy()))

        call, refusal = outcome(read)
        assert isinstance(call, OpenAIRequest) if refusal is None else refusal.param and refusal.code


def chat_call(body: dict[str, Any]) -> OpenAIRequest:
    return openai_request.parse_chat(body, lambda _: None, UnknownFieldPolicy())


@given(st.binary(max_size=50))
def test_bytes(body: bytes) -> None:
    value, refusal = outcome(lambda: parse_body(body))
    assert isinstance(value, dict) if refusal is None else refusal.code == "invalid_json"


def outcome(action: Callable[[], Any]) -> tuple[Any, InvalidRequest | None]:
    try:
        return action(), None
    except InvalidRequest as refusal:
        return None, refusal
