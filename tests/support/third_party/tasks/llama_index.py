"""llama-index: OpenAILike's chats, streams, completions and typed answers; an agent with a tool; embeddings."""

import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

SAID = "Hello, I am a model of one layer, and I say what I was told to say."
HERE = {"api_base": f"{sys.argv[1]}/v1", "api_key": "none", "max_retries": 0}


class City(BaseModel):
    """A city."""

    name: str
    people: int


def get_weather(city: str) -> str:
    """The weather of a city."""
    return "21 degrees"


def made(**more):
    return OpenAILike(
        model="parrot", context_window=4096, is_chat_model=True, is_function_calling_model=True, **HERE, **more
    )


async def agent():
    found = FunctionAgent(tools=[get_weather], llm=made(), system_prompt="You help.")
    return str(await found.run("What is the weather in Paris? script:weather"))


llm = made()
messages = [ChatMessage(role="user", content="script:hello")]
assert llm.chat(messages).message.content == SAID
assert "".join(chunk.delta for chunk in llm.stream_chat(messages)) == SAID
plain = OpenAILike(model="parrot", is_chat_model=False, max_tokens=64, **HERE)
assert plain.complete("Greet.<|hello-0|>").text == SAID
assert llm.as_structured_llm(City).complete("Which city? script:city-call").raw == City(name="Paris", people=2100000)
forced = made(should_use_structured_outputs=True).as_structured_llm(City)
assert forced.complete("Which city? script:city").raw == City(name="Paris", people=2100000)
assert asyncio.run(agent()) == "It is 21 degrees in Paris."
one, two = OpenAILikeEmbedding(model_name="parrot", **HERE).get_text_embedding_batch(["a cat", "a house"])
assert one != two
print("done")
