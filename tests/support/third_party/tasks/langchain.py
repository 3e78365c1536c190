"""langchain-openai: chats, streams, async batches, log-probabilities, bound tools, typed output, embeddings."""

import asyncio
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    name: str
    people: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return "21 degrees"


HERE = {"base_url": f"{sys.argv[1]}/v1", "api_key": "none", "model": "parrot", "max_retries": 0}
SAID = "Hello, I am a model of one layer, and I say what I was told to say."
chat = ChatOpenAI(**HERE)
assert chat.invoke("Greet. script:hello").content == SAID
chunks = list(chat.stream("Greet. script:hello", stream_usage=True))
assert "".join(chunk.content for chunk in chunks) == SAID
assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) > 8
assert [one.content for one in asyncio.run(chat.abatch(["script:hello"] * 4))] == [SAID] * 4
assert (
    len(
        ChatOpenAI(**HERE, logprobs=True, top_logprobs=2)
        .invoke("script:hello")
        .response_metadata["logprobs"]["content"]
    )
    > 8
)

bound = chat.bind_tools([get_weather])
messages = [HumanMessage("What is the weather in Paris? script:weather")]
messages.append(bound.invoke(messages))
for call in messages[-1].tool_calls:
    messages.append(ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]))
assert bound.invoke(messages).content == "It is 21 degrees in Paris."
[call] = chat.bind_tools([get_weather], tool_choice="get_weather", strict=True).invoke("script:weather").tool_calls
assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})

for method, script in (("json_schema", "city"), ("function_calling", "city-call"), ("json_mode", "city")):
    typed = chat.with_structured_output(City, method=method).invoke(f"Which city? In JSON. script:{script}")
    assert typed == City(name="Paris", people=2100000), method

texts = ["a cat", "a house"]
embeddings = OpenAIEmbeddings(**HERE, check_embedding_ctx_length=False)
one, two = embeddings.embed_documents(texts)
assert one != two
assert len(one) == len(two) == len(embeddings.embed_query("a cat"))
assert OpenAI(**HERE, max_tokens=40).invoke("Greet.<|hello-0|>") == SAID
print("done")
