"""Whether and how much the model thinks, in the words of each server that has some."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import asgi
import pytest
from bad_requests import refused
from echo_worker import EchoWorker
from local_ingress import make_ingress
from tool_templates import TEMPLATES, write_tool_tokenizer

from motley.cluster.api.common.chat.chat_reasoning import read_chat_template_kwargs, read_template_arguments
from motley.cluster.api.common.fields.unknown_fields import UnknownFieldPolicy
from motley.replicas.errors import InvalidRequest
from motley.replicas.text.chat.chat_template import ChatTemplate

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
READS = {
    "qwen3": TEMPLATES["qwen3"],
    "deepseek": "{{ messages[0].content }}{% if thinking %}<think>{% else %}</think>{% endif %}",
    "gpt-oss": "{{ messages[0].content }} {{ reasoning_effort }}",
    "always": "{{ messages[0].content }}<think>{{ '</think>' and '' }}",
    "never": "{{ messages[0].content }}",
}


def template(name: str) -> ChatTemplate:
    return ChatTemplate(READS[name], file="x", special_tokens={"bos_token": "<s>"}, literal=())


def read(name: str, body: dict[str, Any]) -> dict[str, Any]:
    return read_template_arguments(body, template(name), UnknownFieldPolicy("refuse"))


OFF = [
    {"reasoning": {"enabled": False}},
    {"think": False},
    {"thinking": {"type": "disabled"}},
    {"thinking": False},
    {"chat_template_kwargs": {"thinking": False}},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
    {"think": False, "reasoning": {"effort": "none", "enabled": False}, "reasoning_effort": "none"},
    {"think": False, "chat_template_kwargs": {"thinking": False}},
]
ON = [
    {"reasoning": {"enabled": True}},
    {"reasoning": {"effort": "medium"}},
    {"think": True},
    {"think": "medium"},
    {"thinking": {"type": "enabled"}},
    {"thinking": {"type": "adaptive"}},
    {"chat_template_kwargs": {"thinking": True, "enable_thinking": True}},
]


@pytest.mark.parametrize(("model", "name"), [("qwen3", "enable_thinking"), ("deepseek", "thinking")])
def test_each_way_to_say_it_is_what_the_template_reads(model: str, name: str) -> None:
    for bodies, value in ((OFF, False), (ON, True)):
        assert [read(model, body) for body in bodies] == [{name: value}] * len(bodies)
    with pytest.raises(InvalidRequest, match="give medium or none"):
        read(model, {"reasoning": {"effort": "high"}})


def test_degrees_are_told_as_they_are() -> None:
    for body in ({"reasoning": {"effort": "high"}}, {"think": "high"}, {"think": "high", "thinking": True},
                 {"reasoning": {"effort": "high", "enabled": True}, "reasoning_effort": "high"}):  # fmt: skip
        assert read("gpt-oss", body) == {"reasoning_effort": "high"}
    assert read("gpt-oss", {"think": False}) == {"reasoning_effort": "none"}


def test_what_is_so_in_any_case_is_taken_and_the_opposite_refused() -> None:
    assert read("always", {"think": True}) == read("never", {"think": False}) == {}
    assert read("never", {"reasoning_effort": "none"}) == read("never", {"reasoning": {"effort": "none"}}) == {}
    for model, body in (
        ("always", {"think": False}),
        ("always", {"reasoning_effort": "none"}),
        ("never", {"reasoning": {"enabled": True}}),
        ("never", {"reasoning_effort": "low"}),
    ):
        with pytest.raises(InvalidRequest, match="knows nothing of it") as caught:
            read(model, body)
        assert caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"think": True, "thinking": False}, "thinking"),
        ({"reasoning": {"effort": "none", "enabled": True}}, "reasoning.enabled"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort"),
        ({"reasoning_effort": "none", "think": "low"}, "think"),
        ({"think": False, "chat_template_kwargs": {"enable_thinking": True}}, "think"),
        ({"chat_template_kwargs": {"enable_thinking": True, "thinking": False}}, "chat_template_kwargs.thinking"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"enabled": "yes"}}, "reasoning.enabled"),
        ({"reasoning": "high"}, "reasoning"),
        ({"think": "true"}, "think"),
        ({"think": 1}, "think"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": "on"}, "thinking"),
    ],
)
def test_what_contradicts_itself_or_is_no_value_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read("qwen3", body)
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")


def test_arguments_that_the_template_does_not_read_are_unknown_fields() -> None:
    given = {"chat_template_kwargs": {"mood": {"deep": [7]}, "enable_thinking": True, "seed": None, "more": ""}}
    assert read_chat_template_kwargs(given, template("qwen3"), UnknownFieldPolicy()) == {"enable_thinking": True}
    with pytest.raises(InvalidRequest, match=r"^chat_template_kwargs\.mood: there is no such field") as caught:
        read_chat_template_kwargs(given, template("qwen3"), UnknownFieldPolicy("refuse"))
    assert caught.value.code == "unknown_parameter"
    for name in ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "pad_token", "chat_template"):
        arguments = read_chat_template_kwargs(
            {"chat_template_kwargs": {name: "x"}}, template("never"), UnknownFieldPolicy()
        )
        with pytest.raises(InvalidRequest, match=f"has no argument '{name}'"):
            template("never").render(HELLO, add_generation_prompt=True, arguments=arguments)
        assert (
            read_chat_template_kwargs({"chat_template_kwargs": {name: None}}, template("never"), UnknownFieldPolicy())
            == {}
        )


async def test_what_cannot_be_had_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_tool_tokenizer(tmp_path, "qwen3")
    ingress = await make_ingress(folder, EchoWorker(str(folder)))
    post = partial(asgi.request, ingress.__serve_build_asgi_app__(), "POST")
    tools = [{"type": "function", "function": {"name": "f"}}]
    for more, param in (
        ({"reasoning": {"exclude": True}, "include_reasoning": True}, "reasoning.exclude"),
        ({"reasoning": {"max_tokens": 100}}, "reasoning.max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"separate_reasoning": False, "tools": tools, "tool_choice": "required"}, "separate_reasoning"),
        ({"separate_reasoning": True, "reasoning_format": "none"}, "reasoning_format"),
        ({"reasoning_format": "much"}, "reasoning_format"),
        ({"chat_template_kwargs": {"enable_thinking": 7}}, "chat_template_kwargs"),
    ):
        assert refused(await post(CHAT, {"messages": HELLO, "max_tokens": 2, **more}))["param"] == param
    beside = {"messages": HELLO, "chat_template_kwargs": {"mood": 7}}
    assert (await post("/tokenize", beside)).json() == (await post("/tokenize", {"messages": HELLO})).json()
