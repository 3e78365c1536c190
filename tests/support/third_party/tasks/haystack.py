"""haystack: a chat and its stream, an agent with a tool, embeddings of texts and of documents."""

import sys
from typing import Annotated

from haystack import Document
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret

SAID = "Hello, I am a model of one layer, and I say what I was told to say."
HERE = {"api_key": Secret.from_token("none"), "api_base_url": f"{sys.argv[1]}/v1", "model": "parrot"}


@tool
def get_weather(city: Annotated[str, "its name"]) -> str:
    """The weather of a city."""
    return "21 degrees"


pieces = []
chat = OpenAIChatGenerator(**HERE)
assert chat.run([ChatMessage.from_user("script:hello")])["replies"][0].text == SAID
chat.run([ChatMessage.from_user("script:hello")], streaming_callback=pieces.append)
assert "".join(piece.content for piece in pieces) == SAID
agent = Agent(chat_generator=OpenAIChatGenerator(**HERE), tools=[get_weather])
answer = agent.run([ChatMessage.from_user("What is the weather in Paris? script:weather")])
assert answer["messages"][-1].text == "It is 21 degrees in Paris."
[document] = OpenAIDocumentEmbedder(**HERE, progress_bar=False).run([Document(content="a cat")])["documents"]
vector = OpenAITextEmbedder(**HERE).run("a cat")["embedding"]
assert max(abs(a - b) for a, b in zip(vector, document.embedding, strict=True)) < 1e-4
print("done")
