"""langgraph and langchain: an agent that calls a tool and answers, streamed by messages."""

import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def get_weather(city: str) -> str:
    """The weather of a city."""
    return "21 degrees"


model = ChatOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", model="parrot", max_retries=0)
agent = create_agent(model, [get_weather])
asked = {"messages": [{"role": "user", "content": "What is the weather in Paris? script:weather"}]}
messages = agent.invoke(asked)["messages"]
assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
assert messages[-1].content == "It is 21 degrees in Paris."
pieces = [piece for piece, _ in agent.stream(asked, stream_mode="messages") if piece.type == "AIMessageChunk"]
assert "".join(piece.content for piece in pieces) == "It is 21 degrees in Paris."
print("done")
