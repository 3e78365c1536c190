"""openai-agents: an agent that calls a tool, one that hands over to it, and a typed output."""

import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
model = OpenAIChatCompletionsModel(model="parrot", openai_client=client)
asked = []


class City(BaseModel):
    name: str
    people: int


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return "21 degrees"


agent = Agent(name="weather", instructions="You help.", model=model, tools=[get_weather])
assert (
    Runner.run_sync(agent, "What is the weather in Paris? script:weather").final_output == "It is 21 degrees in Paris."
)
desk = Agent(name="desk", instructions="You pass on.", model=model, handoffs=[agent])
result = Runner.run_sync(desk, "What is the weather in Paris? script:handoff")
assert (result.final_output, result.last_agent.name) == ("It is 21 degrees in Paris.", "weather")
assert asked == ["Paris", "Paris"]
typed = Agent(name="city", model=model, output_type=City)
assert Runner.run_sync(typed, "Which city? script:city").final_output == City(name="Paris", people=2100000)
print("done")
