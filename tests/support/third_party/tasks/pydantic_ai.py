"""pydantic-ai: an agent with a tool, whole and streamed; a typed output by a tool and by a JSON schema."""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    name: str
    people: int


model = OpenAIChatModel("parrot", provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none"))
agent = Agent(model, system_prompt="You help.")
asked = []


@agent.tool_plain
def get_weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return "21 degrees"


async def stream():
    async with agent.run_stream("What is the weather in Paris? script:weather") as run:
        return "".join([text async for text in run.stream_text(delta=True)])


assert agent.run_sync("What is the weather in Paris? script:weather").output == "It is 21 degrees in Paris."
assert asyncio.run(stream()) == "It is 21 degrees in Paris."
assert asked == ["Paris", "Paris"]
for output, script in ((City, "final-result"), (NativeOutput(City), "city")):
    found = Agent(model, output_type=output).run_sync(f"Which city? script:{script}").output
    assert found == City(name="Paris", people=2100000)
print("done")
