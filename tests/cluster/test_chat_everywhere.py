"""A chat means the same over OpenAI's HTTP and over motley.v1: tools, reasoning, what is refused, and resumed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_servers import serving
from scripted_model import Scripted
from tool_templates import TEMPLATES

from motley.client import AsyncClient, reply
from motley.cluster.protos import inference_pb2 as pb
from motley.replicas.errors import InvalidRequest
from motley.replicas.types import FinishReason

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Weather?"}]
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "Now", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time"}},
]
NAMED = {"type": "function", "function": {"name": "time"}}
SOME = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
ARGUMENTS = '{"place": "Zürich, \\"Enge\\""}'
QWEN = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
LLAMA = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
SAID = {
    "qwen25": f"I look.\n{QWEN}\n{QWEN}",
    "qwen3": f"<think>\nHm, a < b.\n</think>\n\n{QWEN}",
    "opened": f"Hm.\n</think>\n\nI look.{QWEN}",
    "llama31": f"{LLAMA}; {LLAMA}",
}
Plain = dict[str, Any]


class Both:
    """One scripted model, asked over both protocols by `motley.client` and as OpenAI's clients do."""

    def __init__(self, post: Any, client: AsyncClient) -> None:
        self.post, self.client = post, client

    async def http(self, body: Plain) -> tuple[Plain, Plain]:
        """The message, and the usage."""
        answer = await self.post(CHAT, {"messages": HELLO, **body})
        assert answer.status == 200, answer.body
        [choice] = answer.json()["choices"]
        message, usage = choice["message"], answer.json()["usage"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        thought = message.get("reasoning", "")
        return said(message["content"] or "", thought, calls, choice["finish_reason"]), counted(
            usage["prompt_tokens"],
            usage["completion_tokens"],
            usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0),
        )

    async def http_streamed(self, body: Plain) -> tuple[Plain, Plain]:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *events, done = (await self.post(CHAT, {"messages": HELLO, **body, **options})).events()
        assert done == "[DONE]"
        whole, usage = said("", "", [], ""), events[-1]["usage"]
        for choice in (choice for event in events for choice in event["choices"]):
            delta = choice["delta"]
            whole["text"] += delta.get("content") or ""
            whole["reasoning"] += delta.get("reasoning") or ""
            for piece in delta.get("tool_calls", ()):
                if piece["index"] == len(whole["calls"]):
                    whole["calls"].append(piece["function"])
                else:
                    whole["calls"][piece["index"]]["arguments"] += piece["function"]["arguments"]
            whole["finish"] = choice["finish_reason"] or whole["finish"]
        thought = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        return whole, counted(usage["prompt_tokens"], usage["completion_tokens"], thought)

    async def grpc(self, body: Plain) -> tuple[Plain, Plain]:
        answer = await self.client.chat(**{"messages": HELLO, **body})
        return of_choice(answer.choices[0]), of_usage(answer.usage)

    async def streamed(self, body: Plain) -> tuple[Plain, Plain]:
        async with self.client.chat_stream(**{"messages": HELLO, **body}) as stream:
            chunks = [chunk async for chunk in stream]
        return of_choice(joined(chunks)), of_usage(chunks[-1].usage)


def said(text: str, reasoning: str, calls: list[Plain], finish: str) -> Plain:
    return {"text": text, "reasoning": reasoning, "calls": calls, "finish": finish}


def counted(prompt: int, completion: int, reasoning: int) -> Plain:
    return {"prompt": prompt, "completion": completion, "reasoning": reasoning}


def of_choice(choice: pb.Choice) -> Plain:
    calls = [{"name": call.function.name, "arguments": call.function.arguments} for call in choice.tool_calls]
    assert [call.index for call in choice.tool_calls] == list(range(len(calls)))
    assert all(call.id.startswith("call_") for call in choice.tool_calls)
    finish = pb.FinishReason.Name(choice.finish_reason).removeprefix("FINISH_REASON_").lower()
    return said(choice.text, choice.reasoning_content, calls, finish)


def of_usage(usage: pb.Usage) -> Plain:
    return counted(usage.prompt_tokens, usage.completion_tokens, usage.reasoning_tokens)


def joined(chunks: Sequence[pb.CompletionChunk]) -> pb.Choice:
    """The whole choice, as clients put it together."""
    whole = pb.Choice()
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        whole.text += choice.text
        whole.reasoning_content += choice.reasoning_content
        whole.token_ids.extend(choice.token_ids)
        for piece in choice.tool_calls:
            if piece.index == len(whole.tool_calls):
                whole.tool_calls.append(piece)
            else:
                assert not piece.id
                assert not piece.function.name
                whole.tool_calls[piece.index].function.arguments += piece.function.arguments
        whole.finish_reason = choice.finish_reason or whole.finish_reason
    return whole


@pytest.fixture(params=TEMPLATES)
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def scripted(style: str, tmp_path: Path) -> Scripted:
    return Scripted(tmp_path, style)


@pytest.fixture
async def both(style: str, scripted: Scripted) -> AsyncIterator[Both]:
    post = await scripted(SAID[style], step=3)
    async with serving(scripted.ingress) as target, AsyncClient(target) as client:
        yield Both(post, client)


def prompt(scripted: Scripted) -> str:
    return scripted.tokenizer.decode(scripted.worker.requests[-1].prompt_ids, skip_special_tokens=False)


MORE: list[Plain] = [
    {},
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "none"},
    {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": NAMED},
    {"tools": TOOLS, "tool_choice": SOME},
    {"tools": TOOLS, "parallel_tool_calls": False},
    {"tools": [{**TOOLS[0], "function": TOOLS[0]["function"] | {"strict": True}}], "tool_choice": "required"},
]


async def test_the_same_answer_to_the_same_question(both: Both, scripted: Scripted) -> None:
    """And the model is told the same, and held to the same."""
    for more in MORE:
        answers, told = [], []
        for way in (both.http, both.grpc, both.streamed, both.http_streamed):
            answers.append(await way(more))
            told.append((prompt(scripted), scripted.worker.requests[-1].sampling.grammar))
        assert answers[0] == answers[1] == answers[2] == answers[3], more
        assert told[0] == told[1] == told[2] == told[3], more
        if more.get("tools") and not more.get("tool_choice"):
            assert answers[0][0]["finish"] == "tool_calls"
            assert answers[0][0]["calls"][0] == {"name": "weather", "arguments": ARGUMENTS}


async def test_an_answer_and_results_sent_back(both: Both, scripted: Scripted) -> None:
    answer = (await both.client.chat(HELLO, tools=TOOLS, parallel_tool_calls=False)).choices[0]
    [call] = answer.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 °C"}
    await both.client.chat([*HELLO, reply(answer), result], tools=TOOLS)
    over_grpc = prompt(scripted)
    message = (await both.post(CHAT, {"messages": HELLO, "tools": TOOLS, "parallel_tool_calls": False})).json()
    message = message["choices"][0]["message"]
    result["tool_call_id"] = message["tool_calls"][0]["id"]
    await both.http({"messages": [*HELLO, message, result], "tools": TOOLS})
    assert prompt(scripted) == over_grpc
    assert "12 °C" in over_grpc
    await both.client.chat([*HELLO, message, result], tools=TOOLS)
    assert prompt(scripted) == over_grpc


async def test_tokenize_counts_tools_and_arguments_of_the_template(both: Both, style: str) -> None:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(**HELLO[0])])
    body: Plain = {"messages": HELLO}
    if style in ("qwen3", "opened"):
        chat.template_arguments["enable_thinking"].flag = False
        body["chat_template_kwargs"] = {"enable_thinking": False}
    alone = (await both.client.stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids
    assert list(alone) == (await both.post("/tokenize", body)).json()["tokens"]
    chat.tools.add().function.name = "time"
    more = (await both.client.stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids
    assert list(more) == (await both.post("/tokenize", {**body, "tools": [NAMED]})).json()["tokens"]
    assert len(more) > len(alone)


@pytest.mark.parametrize("style", ["qwen3"])
async def test_reasoning_effort(both: Both, scripted: Scripted) -> None:
    for way in (both.http, both.grpc):
        await way({"reasoning_effort": "none"})
        assert prompt(scripted).endswith("<think>\n\n</think>\n\n")
    for effort in ("high", "much"):
        with pytest.raises(InvalidRequest) as caught:
            await both.grpc({"reasoning_effort": effort})
        assert caught.value.param == "reasoning_effort"
    with pytest.raises(InvalidRequest, match=r"^reasoning_effort: .* beside template_arguments\.enable_thinking"):
        await both.client.chat(HELLO, template_arguments={"enable_thinking": True}, reasoning_effort="none")


REFUSED: list[Plain] = [
    {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    {"tools": [NAMED, NAMED]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
    {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"$ref": "#/x"}}}]},
    {"tool_choice": NAMED},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOLS},
    {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "tools": TOOLS},
    {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [NAMED]}}, "tools": TOOLS},
    {"messages": [*HELLO, {"role": "tool", "content": "x", "tool_call_id": "y"}]},
    {"messages": [*HELLO, {"role": "user", "content": "x", "tool_call_id": "y"}]},
    {"messages": [*HELLO, {"role": "user", "content": "x", "reasoning_content": "y"}]},
]


@pytest.mark.parametrize("style", ["qwen25"])
async def test_the_same_refusal_by_the_same_name(both: Both) -> None:
    for more in REFUSED:
        error = (await both.post(CHAT, {"messages": HELLO, **more})).json()["error"]
        for way in (both.grpc, both.streamed):
            with pytest.raises(InvalidRequest) as caught:
                await way(more)
            assert caught.value.param == error["param"]


@pytest.mark.parametrize("style", ["qwen25"])
async def test_what_only_protobuf_can_say_is_refused_by_name(both: Both) -> None:
    tool = pb.Tool(function=pb.Function(name="f", parameters="{"))
    request = pb.ChatRequest(messages=[pb.ChatMessage(**HELLO[0])], tools=[tool])
    for parameters, choice, name in (
        ("{", None, "tools[0].function.parameters: it is not JSON"),
        ("[]", None, "tools[0].function.parameters: it is not a JSON object"),
        ("[" * 10**4, None, "tools[0].function.parameters: it is not JSON"),
        ("[" * 10**5, None, "tools: its JSON holds more than"),
        ("{}", pb.ToolChoice(), "tool_choice: it is empty"),
        ("{}", pb.ToolChoice(mode=99), "tool_choice: '99' is not accepted"),  # type: ignore[arg-type]
        ("{}", pb.ToolChoice(allowed_tools=pb.AllowedTools()), "tool_choice.allowed_tools.mode: "),
    ):
        tool.function.parameters = parameters
        request = pb.ChatRequest(messages=[pb.ChatMessage(**HELLO[0])], tools=[tool], tool_choice=choice)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await both.client.stub.Chat(request)
        assert (caught.value.details() or "").startswith(name)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


BROKEN = {
    '{"place": NaN}': {"place": None},
    '{"place": "a" "b"}': {"place": 'a" "b'},
    '{"place": "echo "hi" && rm x"}': {"place": 'echo "hi" && rm x'},
    '{"place": "SELECT * FROM "t" WHERE 1"}': {"place": 'SELECT * FROM "t" WHERE 1'},
    '{"place": http://e.com/a}': {"place": "http://e.com/a"},
    '{"place": [}': {"place": []},
    '{"place": "Zürich"': {"place": "Zürich"},
    "{'place': 1}": {"place": 1},
}


@pytest.mark.covering
@pytest.mark.parametrize("style", ["qwen25", "llama31"])
@pytest.mark.parametrize("arguments", BROKEN)
@pytest.mark.parametrize("step", [1, 5])
async def test_a_call_of_broken_json_is_the_same_call_streamed_and_whole(
    style: str, arguments: str, step: int, scripted: Scripted
) -> None:
    call = (QWEN if style == "qwen25" else LLAMA).replace(ARGUMENTS, arguments)
    post = await scripted(call, step=step)
    async with serving(scripted.ingress) as target, AsyncClient(target) as client:
        both = Both(post, client)
        told = [await way({"tools": TOOLS}) for way in (both.http, both.grpc, both.streamed, both.http_streamed)]
    assert told[0] == told[1] == told[2] == told[3]
    answer = told[0][0]
    assert answer["text"] == ""
    assert [found["name"] for found in answer["calls"]] == ["weather"]
    assert json.loads(answer["calls"][0]["arguments"]) == BROKEN[arguments]
    assert answer["finish"] == "tool_calls"


@pytest.mark.parametrize("text", ["<tool_call>\n{", "x</thi"])
async def test_a_stream_cut_off_says_what_was_held_back(text: str, scripted: Scripted) -> None:
    post = await scripted(text, FinishReason.LENGTH)
    async with serving(scripted.ingress) as target, AsyncClient(target) as client:
        both = Both(post, client)
        assert await both.http({}) == await both.streamed({}) == await both.grpc({})


@pytest.mark.slow("A stream is broken at two dozen places or more, and resumed")
@pytest.mark.parametrize("step", [1, 4])
async def test_a_stream_broken_anywhere_goes_on_as_it_was(style: str, step: int, scripted: Scripted) -> None:
    """The client asks again with the ids that it has; the rest is what it would have been, in the middle of a call."""
    await scripted(SAID[style], step=step)
    whole = list(scripted.worker._messages)
    request = pb.ChatRequest(messages=[pb.ChatMessage(**HELLO[0])])
    for tool in TOOLS:
        request.tools.add().function.name = tool["function"]["name"]
    async with serving(scripted.ingress) as target, AsyncClient(target) as client:
        chunks = [chunk async for chunk in client.stub.ChatStream(request)]
        expected, usage = of_choice(joined(chunks)), chunks[-1].usage
        for cut in range(0, len(whole) - 1, max(1, len(whole) // 25)):
            before = chunks[: cut + 1]  # the first says that it started
            del request.output_ids[:]
            request.output_ids.add(ids=joined(before).token_ids)
            scripted.worker._messages = [whole[0], *whole[cut + 1 :]]
            after = [chunk async for chunk in client.stub.ChatStream(request)]
            assert of_choice(joined([*before, *after])) == expected, cut
            assert after[-1].usage.reasoning_tokens == usage.reasoning_tokens
