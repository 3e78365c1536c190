"""ag2: an agent with a tool, whole and streamed."""

import asyncio
import sys

from ag2 import Agent
from ag2.config import OpenAIConfig


async def get_weather(city: str) -> str:
    """The weather of a city."""
    return "21 degrees"


async def main():
    for streaming in (False, True):
        config = OpenAIConfig(
            model="parrot", base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, streaming=streaming
        )
        agent = Agent("assistant", prompt="You help.", config=config, tools=[get_weather])
        reply = await agent.ask("What is the weather in Paris? script:weather")
        assert reply.body == "It is 21 degrees in Paris.", reply.body


asyncio.run(main())
print("done")
