"""chatlas: a chat, a tool, and data of a type."""

import sys

from chatlas import ChatOpenAICompletions
from pydantic import BaseModel


class City(BaseModel):
    name: str
    people: int


def get_weather(city: str) -> str:
    """The weather of a city."""
    return "21 degrees"


def chat():
    return ChatOpenAICompletions(model="parrot", base_url=f"{sys.argv[1]}/v1", api_key="none")


assert str(chat().chat("Greet. script:hello", echo="none")).startswith("Hello, I am a model")
weather = chat()
weather.register_tool(get_weather)
assert "It is 21 degrees in Paris." in str(weather.chat("What is the weather in Paris? script:weather", echo="none"))
assert chat().chat_structured("Which city? script:city", data_model=City) == City(name="Paris", people=2100000)
print("done")
