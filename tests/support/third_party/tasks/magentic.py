"""magentic: a function that the model answers, as a type, and one that calls a tool of ours."""

import sys

from magentic import OpenaiChatModel, StreamedStr, prompt, prompt_chain
from pydantic import BaseModel

model = OpenaiChatModel("parrot", base_url=f"{sys.argv[1]}/v1", api_key="none")


class City(BaseModel):
    name: str
    people: int


@prompt("Which city is the capital of {country}? script:return-city", model=model)
def capital(country: str) -> City: ...


@prompt("Greet. script:hello", model=model)
def greet() -> StreamedStr: ...


def get_weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Paris"
    return "21 degrees"


@prompt_chain("What is the weather in {city}? script:weather", functions=[get_weather], model=model)
def weather(city: str) -> str: ...


assert capital("France") == City(name="Paris", people=2100000)
assert "".join(greet()).startswith("Hello, I am a model")
assert weather("Paris") == "It is 21 degrees in Paris."
print("done")
