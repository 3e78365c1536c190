"""autogen: an agent with a tool, whole and streamed, and a typed answer."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel


class City(BaseModel):
    name: str
    people: int


async def get_weather(city: str) -> str:
    """The weather of a city."""
    return "21 degrees"


async def main():
    info = {
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "structured_output": True,
        "family": ModelFamily.UNKNOWN,
    }
    client = OpenAIChatCompletionClient(model="parrot", base_url=f"{sys.argv[1]}/v1", api_key="none", model_info=info)
    for stream in (False, True):
        agent = AssistantAgent("a", client, tools=[get_weather], reflect_on_tool_use=True, model_client_stream=stream)
        result = await agent.run(task="What is the weather in Paris? script:weather")
        assert result.messages[-1].content == "It is 21 degrees in Paris."
    asked = [UserMessage(content="Which city? script:city", source="user")]
    answer = await client.create(asked, json_output=City)
    assert City.model_validate_json(answer.content) == City(name="Paris", people=2100000)


asyncio.run(main())
print("done")
