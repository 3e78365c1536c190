"""The unmodified `openai` client against the whole service."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from serve_process import Served

HELLO: list[dict[str, str]] = [{"role": "user", "content": "Hello"}]
GREEDY = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"enum": ["here", "there"]}, "soon": {"type": "boolean"}},
    "required": ["place", "soon"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS, "strict": True}}
    for name in ("weather", "time")
]
NAMED = {"type": "function", "function": {"name": "time"}}


class Weather(BaseModel):
    sky: Literal["clear", "grey"]
    dry: bool


def tokens_of(client: openai.OpenAI, text: str) -> list[int]:
    return list(client.post("/../tokenize", body={"prompt": text}, cast_to=dict)["tokens"])


def test_completion(client: openai.OpenAI) -> None:
    response = client.completions.create(prompt="abc", max_tokens=12, **GREEDY)
    assert response.choices[0].finish_reason == "length"
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (3, 12)
    assert client.completions.create(prompt="abc", max_tokens=12, **GREEDY).choices[0].text == response.choices[0].text


def test_streamed_completion_is_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt="abc", max_tokens=64, **GREEDY)
    chunks = list(
        client.completions.create(
            prompt="abc", max_tokens=64, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert len(chunks) > 8, "tokens come as they are made"


def test_chat_and_its_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=HELLO, max_completion_tokens=32, **GREEDY)
    message = whole.choices[0].message
    assert message.role == "assistant"
    chunks = list(client.chat.completions.create(messages=HELLO, max_completion_tokens=32, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_chat_logprobs(client: openai.OpenAI) -> None:
    response = client.chat.completions.create(
        messages=HELLO, max_completion_tokens=8, logprobs=True, top_logprobs=3, **GREEDY
    )
    entries = response.choices[0].logprobs.content
    assert len(entries) == 8
    for entry in entries:
        assert entry.logprob == entry.top_logprobs[0].logprob, "greedy takes the best"
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
        assert math.exp(entry.logprob) <= 1.0
    content = b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace")
    assert content == response.choices[0].message.content


def test_completion_logprobs_with_echo(client: openai.OpenAI) -> None:
    response = client.completions.create(prompt="abc", max_tokens=4, logprobs=2, echo=True, **GREEDY)
    logprobs = response.choices[0].logprobs
    assert logprobs.tokens[:3] == ["a", "b", "c"]
    assert logprobs.text_offset[:4] == [0, 1, 2, 3]
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 7
    assert logprobs.token_logprobs[0] is None
    assert all(value is not None for value in logprobs.token_logprobs[1:])
    assert response.choices[0].text.startswith("abc")


def test_choices_differ_and_repeat_with_the_seed(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        response = client.completions.create(model="tiny", prompt="abc", max_tokens=16, n=3, seed=seed)
        return [choice.text for choice in response.choices]

    assert len(set(texts(1))) == 3
    assert texts(1) == texts(1) != texts(2)


def test_stop_strings_are_no_part_of_the_text(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt="abc", max_tokens=64, **GREEDY).choices[0].text
    stop = next(char for char in whole[8:] if char.isascii() and char not in whole[:4])
    stopped = client.completions.create(prompt="abc", max_tokens=64, stop=[stop], **GREEDY).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole[: whole.index(stop)]
    chunks = client.completions.create(prompt="abc", max_tokens=64, stop=[stop], stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in chunks) == stopped.text


def test_several_prompts(client: openai.OpenAI) -> None:
    alone = [client.completions.create(prompt=p, max_tokens=8, **GREEDY).choices[0].text for p in ("abc", "xyz")]
    together = client.completions.create(prompt=["abc", "xyz"], max_tokens=8, **GREEDY)
    assert [choice.text for choice in together.choices] == alone


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI, service: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="abc", n=0)
    assert caught.value.param == "n"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x" * 65_536, stream=True)
    assert caught.value.code == "context_length_exceeded", "refused before the stream begins"
    service.wait_idle()


@pytest.mark.parametrize(("choice", "names"), [("required", {"weather", "time"}), (NAMED, {"time"})])
def test_calls_whole_and_streamed(client: openai.OpenAI, choice: Any, names: set[str]) -> None:
    requested: dict[str, Any] = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    requested |= {"model": "tiny", "temperature": 0, "max_completion_tokens": 512}
    requested["logit_bias"] = dict.fromkeys(
        map(str, tokens_of(client, " \n\r\t")), -100
    )  # else it may write nothing else
    whole = client.chat.completions.create(**requested).choices[0]
    with client.chat.completions.stream(**requested) as events:
        streamed = events.get_final_completion().choices[0]
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    [call], [repeated] = whole.message.tool_calls, streamed.message.tool_calls
    assert call.function.name in names
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"place", "soon"}
    assert arguments["place"] in ("here", "there")
    assert (repeated.function.name, json.loads(repeated.function.arguments)) == (call.function.name, arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "fine"}
    said = [*HELLO, whole.message.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(messages=said, tools=TOOLS, max_completion_tokens=1, **GREEDY).choices


def test_answers_as_the_clients_own_types(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Weather, temperature=0, max_completion_tokens=512
    )
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    assert parsed.choices[0].finish_reason == "stop"


def test_json_object(client: openai.OpenAI) -> None:
    """Braces are all but forced, or a random model may never close what it opens."""
    bias = dict.fromkeys(map(str, tokens_of(client, "{}")), 100)
    response = client.chat.completions.create(
        model="tiny", messages=HELLO, response_format={"type": "json_object"}, logit_bias=bias, max_completion_tokens=64
    )
    assert json.loads(response.choices[0].message.content) == {}


def test_cached_tokens_of_a_prompt_asked_again(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What was asked before is not computed again. " * 8}]
    cached = []
    for _ in range(2):
        usage = client.chat.completions.create(messages=messages, max_completion_tokens=1, **GREEDY).usage
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert usage.prompt_tokens - 16 <= cached[1] < usage.prompt_tokens
