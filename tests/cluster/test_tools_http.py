"""Calls of tools and reasoning over OpenAI's HTTP: whole and streamed, in what the model writes."""

from __future__ import annotations

import json
import operator
from functools import partial, reduce
from pathlib import Path
from typing import Any

import asgi
import pytest
from local_ingress import make_ingress
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from scripted_model import Scripted
from scripted_worker import ScriptedWorker
from tool_templates import TEMPLATES

from motley.replicas.types import FinishReason

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Weather?"}]
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("weather", "time")]
NAMED = {"type": "function", "function": {"name": "time"}}
ARGUMENTS = '{"place": "Zürich, \\"Enge\\""}'
QWEN_CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
LLAMA_CALL = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
CALLS = {"qwen25": QWEN_CALL, "qwen3": QWEN_CALL, "opened": f"Hm.\n</think>\n\n{QWEN_CALL}", "llama31": LLAMA_CALL}


@pytest.fixture(params=TEMPLATES)
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def scripted(style: str, tmp_path: Path) -> Scripted:
    return Scripted(tmp_path, style)


def assemble(events: list[Any]) -> dict[str, Any]:
    """A message from its chunks, as clients put it together."""
    *chunks, done = events
    assert done == "[DONE]"
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            message["reasoning"] += delta.get("reasoning") or ""
            for piece in delta.get("tool_calls", ()):
                if piece["index"] == len(message["tool_calls"]):
                    assert piece["type"] == "function"
                    assert piece["id"]
                    message["tool_calls"].append({"name": piece["function"]["name"], "arguments": ""})
                else:
                    assert not {"id", "type"} & set(piece)
                    assert set(piece["function"]) == {"arguments"}
                message["tool_calls"][piece["index"]]["arguments"] += piece["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"] or message.get("finish_reason")
    return message


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
async def test_calls_streamed_and_whole(style: str, scripted: Scripted, step: int) -> None:
    post = await scripted(CALLS[style], step=step)
    body = {"messages": HELLO, "tools": TOOLS}
    answer = (await post(CHAT, body)).json()
    ChatCompletion.model_validate(answer, strict=True)
    assert answer["system_fingerprint"].startswith("fp_")
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    message = assemble((await post(CHAT, {**body, "stream": True})).events())
    assert message["tool_calls"] == [call["function"]]
    assert (message["content"], message["finish_reason"]) == ("", "tool_calls")
    assert message["reasoning"] == choice["message"].get("reasoning", "") == ("Hm." if style == "opened" else "")


async def test_arguments_come_while_they_are_written(style: str, scripted: Scripted) -> None:
    post = await scripted(CALLS[style])
    events = (await post(CHAT, {"messages": HELLO, "tools": TOOLS, "stream": True})).events()[:-1]
    pieces = [c["choices"][0]["delta"]["tool_calls"][0] for c in events if "tool_calls" in c["choices"][0]["delta"]]
    assert len(pieces) >= len(ARGUMENTS) - 4  # a backslash comes with what it escapes, a quote with what shows its end
    assert "".join(piece["function"]["arguments"] for piece in pieces) == ARGUMENTS


async def test_a_model_that_calls_nothing_just_answers(style: str, scripted: Scripted) -> None:
    text = "{It} rains <b>today</b>.\n"
    post = await scripted(("</think>" if style == "opened" else "") + text)
    choice = (await post(CHAT, {"messages": HELLO, "tools": TOOLS})).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}], ids=["no tools", "none wanted"])
async def test_without_tools_a_call_is_text(style: str, scripted: Scripted, more: dict[str, Any]) -> None:
    post = await scripted(CALLS[style])
    choice = (await post(CHAT, {"messages": HELLO, **more})).json()["choices"][0]
    assert choice["message"]["content"] == CALLS[style].removeprefix("Hm.\n</think>\n\n")
    assert choice["finish_reason"] == "stop"
    prompt = scripted.tokenizer.decode(scripted.worker.requests[-1].prompt_ids, skip_special_tokens=False)
    assert "weather" not in prompt


async def test_the_model_is_told_of_the_tools_that_it_may_call(style: str, scripted: Scripted) -> None:
    post = await scripted("x")
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    for choice, told in (("auto", {"weather", "time"}), (allowed, {"time"})):
        assert (await post(CHAT, {"messages": HELLO, "tools": TOOLS, "tool_choice": choice})).status == 200
        prompt = scripted.tokenizer.decode(scripted.worker.requests[-1].prompt_ids, skip_special_tokens=False)
        assert {name for name in ("weather", "time") if f'"{name}"' in prompt} == told


async def test_the_model_sees_a_tool_as_its_client_wrote_it(scripted: Scripted) -> None:
    """However its arguments are held to: a format is a format, and /tokenize counts the same."""
    post = await scripted("x")
    day = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": day}}]
    reply = await post(CHAT, {"messages": HELLO, "tools": tools})
    assert reply.status == 200
    prompt = scripted.tokenizer.decode(scripted.worker.requests[-1].prompt_ids, skip_special_tokens=False)
    assert '"format": "date"' in prompt
    assert "pattern" not in prompt
    counted = (await post("/tokenize", {"messages": HELLO, "tools": tools})).json()
    assert counted["count"] == reply.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("style", ["qwen25"])
async def test_one_call_where_parallel_ones_are_not_wanted(scripted: Scripted) -> None:
    post = await scripted(QWEN_CALL + "\n" + QWEN_CALL)
    body: dict[str, Any] = {"messages": HELLO, "tools": TOOLS}
    for parallel, count in ((True, 2), (False, 1), (None, 2)):
        choice = (await post(CHAT, {**body, "parallel_tool_calls": parallel})).json()["choices"][0]
        assert len(choice["message"]["tool_calls"]) == count
        streamed = assemble((await post(CHAT, {**body, "parallel_tool_calls": parallel, "stream": True})).events())
        assert len(streamed["tool_calls"]) == count


@pytest.mark.parametrize("style", ["qwen25"])
async def test_a_call_cut_off_is_handed_out_as_far_as_it_goes(scripted: Scripted) -> None:
    post = await scripted(QWEN_CALL[:-25], FinishReason.LENGTH)
    body = {"messages": HELLO, "tools": TOOLS}
    choice = (await post(CHAT, body)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
    [call] = [call["function"] for call in choice["message"]["tool_calls"]]
    assert call["name"] == "weather"
    assert ARGUMENTS.startswith(call["arguments"])
    assert QWEN_CALL[:-25].endswith(call["arguments"])
    message = assemble((await post(CHAT, {**body, "stream": True})).events())
    assert (message["content"], message["finish_reason"], message["tool_calls"]) == ("", "length", [call])


@pytest.mark.parametrize("style", ["qwen25"])
async def test_a_required_call_cut_before_its_name_shows_no_mark(scripted: Scripted) -> None:
    begun = '<tool_call>\n{"'
    post = await scripted(begun, FinishReason.LENGTH)
    for choice, content in (("required", ""), (NAMED, ""), ("auto", begun)):
        body = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice}
        [whole] = (await post(CHAT, body)).json()["choices"]
        assert (whole["message"]["content"] or "", whole["finish_reason"]) == (content, "length")
        assert not whole["message"].get("tool_calls")
        message = assemble((await post(CHAT, {**body, "stream": True})).events())
        assert (message["content"], message["finish_reason"], message["tool_calls"]) == (content, "length", [])


@pytest.mark.parametrize("style", ["qwen25"])
async def test_log_probabilities_cover_the_calls(scripted: Scripted) -> None:
    post = await scripted(QWEN_CALL, logprobs=True)
    body = {"messages": HELLO, "tools": TOOLS, "logprobs": True}
    whole = (await post(CHAT, body)).json()["choices"][0]["logprobs"]["content"]
    assert len(whole) == len(scripted.ids)
    events = (await post(CHAT, {**body, "stream": True})).events()[:-1]
    parts = [e["choices"][0]["logprobs"]["content"] for e in events if e["choices"][0]["logprobs"]]
    assert reduce(operator.iadd, parts, []) == whole


@pytest.mark.parametrize("style", ["qwen3", "opened"])
@pytest.mark.parametrize("step", [1, 5, 1000])
async def test_reasoning_and_its_tokens(style: str, scripted: Scripted, step: int) -> None:
    thought = "Let me see:\n  a < b."
    text = ("<think>\n" if style == "qwen3" else "") + f"{thought}\n</think>\n\nYes."
    post = await scripted(text, step=step)
    body = {"messages": HELLO, "stream_options": None}
    answer = (await post(CHAT, body)).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == (thought, thought, "Yes.")
    marks = 3 if style == "qwen3" else 2  # <think>, a line end before </think> and that itself; after <think> another
    count = len(thought) + marks + (style == "qwen3")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}
    events = (await post(CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}})).events()
    assert assemble(events)["reasoning"] == thought
    assert assemble(events)["content"] == "Yes."
    assert events[-2]["usage"] == answer["usage"]
    for more, content in (({"reasoning": {"exclude": True}}, "Yes."), ({"separate_reasoning": False}, text),
                          ({"reasoning_format": "none"}, text)):  # fmt: skip
        message = (await post(CHAT, {**body, **more})).json()["choices"][0]["message"]
        streamed = assemble((await post(CHAT, {**body, **more, "stream": True})).events())
        assert (message["content"], "reasoning" in message) == (content, False)
        assert (streamed["content"], streamed["reasoning"]) == (content, "")


@pytest.mark.parametrize("style", ["qwen3", "opened"])
async def test_thinking_can_be_switched_off(style: str, scripted: Scripted) -> None:
    post = await scripted("Yes, </think> is a mark.")
    for more in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        answer = (await post(CHAT, {"messages": HELLO, **more})).json()
        assert answer["choices"][0]["message"]["content"] == "Yes, </think> is a mark."
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
        prompt = scripted.tokenizer.decode(scripted.worker.requests[-1].prompt_ids, skip_special_tokens=False)
        assert prompt.endswith("<think>\n\n</think>\n\n")
    error = (await post(CHAT, {"messages": HELLO, "reasoning_effort": "none",
                               "chat_template_kwargs": {"enable_thinking": True}})).json()["error"]  # fmt: skip
    assert error["param"] == "reasoning_effort"


@pytest.mark.parametrize("style", ["qwen3"])
async def test_a_message_sent_back_as_it_came(scripted: Scripted) -> None:
    post = await scripted("<think>\nHm.\n</think>\n\nI look." + QWEN_CALL)
    body = {"messages": HELLO, "tools": TOOLS}
    message = (await post(CHAT, body)).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "12 °C"}
    assert (await post(CHAT, {**body, "messages": [*HELLO, message, result]})).status == 200
    prompt = scripted.tokenizer.decode(scripted.worker.requests[-1].prompt_ids, skip_special_tokens=False)
    assert f"<think>\nHm.\n</think>\n\nI look.\n{QWEN_CALL}" in prompt
    assert "<tool_response>\n12 °C\n</tool_response>" in prompt


async def test_a_model_that_knows_no_tools_refuses_them(folder: Path) -> None:
    ingress = await make_ingress(folder, ScriptedWorker(str(folder), []))
    post = partial(asgi.request, ingress.__serve_build_asgi_app__(), "POST")
    for more, param in (({"tools": TOOLS}, "tools"), ({"reasoning_effort": "medium"}, "reasoning_effort")):
        error = (await post(CHAT, {"messages": HELLO, **more})).json()["error"]
        assert (error["param"], error["code"]) == (param, "unsupported_parameter")


@pytest.mark.parametrize("style", ["qwen25"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "any", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": 7, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOLS}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": TOOLS}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none"}}, "tools": TOOLS},
         "tool_choice.allowed_tools.mode"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "tools": TOOLS},
         "tool_choice.allowed_tools.tools"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"function": NAMED["function"]}]}}, "tools": TOOLS}, "tool_choice.allowed_tools.tools[0].type"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"parallel_tool_calls": 1, "tools": TOOLS}, "parallel_tool_calls"),
    ],
)  # fmt: skip
async def test_wrong_fields_are_named(scripted: Scripted, fields: dict[str, Any], param: str) -> None:
    post = await scripted("x")
    reply = await post(CHAT, {"messages": HELLO, **fields})
    assert reply.status == 400
    assert reply.json()["error"]["param"] == param
    assert json.loads(reply.body)["error"]["message"].startswith(param)


@pytest.mark.parametrize("style", ["qwen3"])
async def test_the_template_for_tools_decides_for_chats_with_tools(scripted: Scripted, tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATES["qwen3"])
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}{{ mood }}")
    post = await scripted(QWEN_CALL)
    thinks = {"messages": HELLO, "reasoning_effort": "none"}
    answer = (await post(CHAT, {**thinks, "tools": TOOLS})).json()
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert (await post(CHAT, thinks | {"reasoning_effort": "medium"})).json()["error"]["param"] == "reasoning_effort"
    for mood, more, param in ((7, {}, "chat_template_kwargs"), (7, {"tools": TOOLS}, None), ("x", {}, None)):
        reply = await post(CHAT, {"messages": HELLO, "chat_template_kwargs": {"mood": mood}, **more})
        assert (None if reply.status == 200 else reply.json()["error"]["param"]) == param
