"""smolagents: an agent that calls tools, one that writes code, by openai and by litellm."""

import sys

from smolagents import CodeAgent, LiteLLMModel, OpenAIServerModel, ToolCallingAgent, tool


@tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return "21 degrees"


URL = f"{sys.argv[1]}/v1"
for model in (
    OpenAIServerModel("parrot", api_base=URL, api_key="none"),
    LiteLLMModel("openai/parrot", api_base=URL, api_key="none"),
):
    agent = ToolCallingAgent(tools=[get_weather], model=model, max_steps=4, verbosity_level=0)
    assert agent.run("What is the weather in Paris? script:final-answer") == "It is 21 degrees in Paris."
    coder = CodeAgent(tools=[get_weather], model=model, max_steps=2, verbosity_level=0)
    assert coder.run("What is the weather in Paris? script:code") == "It is 21 degrees in Paris."
print("done")
