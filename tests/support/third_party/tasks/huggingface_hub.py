"""huggingface_hub's InferenceClient: chats, streams, tools, and a format of the answer."""

import asyncio
import json
import sys

from huggingface_hub import AsyncInferenceClient, InferenceClient

SAID = "Hello, I am a model of one layer, and I say what I was told to say."
CITY = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["name", "people"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
client = InferenceClient(base_url=f"{sys.argv[1]}/v1", api_key="none")


def said(text):
    return [{"role": "user", "content": text}]


assert client.chat_completion(said("script:hello"), model="parrot").choices[0].message.content == SAID
chunks = client.chat.completions.create(messages=said("script:hello"), model="parrot", stream=True, max_tokens=64)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID
asked = {"messages": said("Which city? script:city"), "model": "parrot"}
form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
answer = client.chat_completion(**asked, response_format=form).choices[0].message.content
assert json.loads(answer) == {"name": "Paris", "people": 2100000}
[call] = (
    client.chat_completion(said("script:weather"), model="parrot", tools=[TOOL], tool_choice="auto")
    .choices[0]
    .message.tool_calls
)
assert json.loads(call.function.arguments) == {"city": "Paris"}


async def again():
    async with AsyncInferenceClient(base_url=f"{sys.argv[1]}/v1", api_key="none") as other:
        answers = await asyncio.gather(*(other.chat_completion(said("script:hello"), model="parrot") for _ in range(4)))
        return [answer.choices[0].message.content for answer in answers]


assert asyncio.run(again()) == [SAID] * 4
print("done")
