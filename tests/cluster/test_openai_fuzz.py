"""Whatever JSON comes, the translators answer with a call or with a refusal that has a name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from motley.cluster.protocols import openai_ask, openai_table
from motley.cluster.protocols.body_shapes import settle
from motley.cluster.protocols.foreign_fields import FOREIGN
from motley.cluster.protocols.openai_ask import Call
from motley.cluster.protocols.openai_bodies import SHAPES
from motley.cluster.protocols.openai_fields import parse_object
from motley.cluster.unknown_fields import UnknownFields
from motley.replicas.errors import InvalidRequest

TABLES = {"prompt": openai_table.by_name(openai_table.COMPLETION), "messages": openai_table.by_name(openai_table.CHAT)}
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
    for needed, translate in (("prompt", openai_ask.completion_call), ("messages", chat_call)):
        call, refusal = outcome(lambda translate=translate: translate(parse_object(json.dumps(body).encode())))
        if refusal is not None:
            assert refusal.param is not None
            assert refusal.code
        else:
            assert isinstance(call, Call)
            assert body[needed] is not None
            for name, value in body.items():
                field = TABLES[needed][name]
                assert field.instead is None or value in (None, *field.neutral)


FOREIGN_NAMES = sorted({one.name for one in FOREIGN if not one.at})
SETTLED = st.dictionaries(st.sampled_from(FOREIGN_NAMES) | st.sampled_from(NAMES), JSON | st.sampled_from([-1, 0, 1]))


@given(SETTLED | st.builds(lambda inner, body: {**body, "options": inner}, SETTLED, SETTLED))
@example({"options": {"options": {}}, "parameters": {"n_predict": -1}, "n_predict": -1, "num_predict": 3})
def test_bodies_of_others(body: dict[str, Any]) -> None:
    plain = {"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}
    for one, route, translate in zip(
        plain, ("completion", "chat"), (openai_ask.completion_call, chat_call), strict=True
    ):
        sent = json.dumps({**body, **one}).encode()

        def read(sent: bytes = sent, route: str = route, translate: Callable[..., Call] = translate) -> Call:
            return translate(settle(parse_object(sent), SHAPES[route], UnknownFields()))

        call, refusal = outcome(read)
        assert isinstance(call, Call) if refusal is None else refusal.param and refusal.code


def chat_call(body: dict[str, Any]) -> Call:
    return openai_ask.chat_call(body, lambda _: None, UnknownFields())


@given(st.binary(max_size=50))
def test_bytes(body: bytes) -> None:
    value, refusal = outcome(lambda: parse_object(body))
    assert isinstance(value, dict) if refusal is None else refusal.code == "invalid_json"


def outcome(action: Callable[[], Any]) -> tuple[Any, InvalidRequest | None]:
    try:
        return action(), None
    except InvalidRequest as refusal:
        return None, refusal
