"""litellm, as "openai/…" and "hosted_vllm/…": chats, streams, tools, typed answers, completions, embeddings, errors."""

import asyncio
import json
import sys

import litellm
from pydantic import BaseModel

SAID = "Hello, I am a model of one layer, and I say what I was told to say."
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class City(BaseModel):
    name: str
    people: int


def said(text):
    return [{"role": "user", "content": text}]


for provider in ("openai", "hosted_vllm", "custom_openai", "litellm_proxy"):
    here = {"model": f"{provider}/parrot", "api_base": f"{sys.argv[1]}/v1", "api_key": "none", "num_retries": 0}
    assert litellm.completion(messages=said("script:hello"), **here).choices[0].message.content == SAID
    chunks = list(litellm.completion(messages=said("script:hello"), stream=True, **here))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID
    messages = said("What is the weather in Paris? script:weather")
    answer = litellm.completion(messages=messages, tools=[TOOL], tool_choice="auto", **here).choices[0].message
    assert json.loads(answer.tool_calls[0].function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "name": "get_weather", "content": "21 degrees"}
    messages += [answer.model_dump(), result]
    last = litellm.completion(messages=messages, tools=[TOOL], **here).choices[0].message.content
    assert last == "It is 21 degrees in Paris."
    typed = litellm.completion(messages=said("Which city? script:city"), response_format=City, **here)
    assert City.model_validate_json(typed.choices[0].message.content) == City(name="Paris", people=2100000)

here = {"model": "openai/parrot", "api_base": f"{sys.argv[1]}/v1", "api_key": "none", "num_retries": 0}
text = {**here, "model": "text-completion-openai/parrot"}
assert litellm.text_completion(prompt="Greet.<|hello-0|>", max_tokens=64, **text).choices[0].text == SAID
assert len(litellm.embedding(input=["a cat", "a house"], **here).data) == 2


async def many():
    answers = await asyncio.gather(*(litellm.acompletion(messages=said("script:hello"), **here) for _ in range(4)))
    return [answer.choices[0].message.content for answer in answers]


assert asyncio.run(many()) == [SAID] * 4
try:
    litellm.completion(messages=said("x" * 40_000), **here)
except litellm.ContextWindowExceededError:
    print("done")
