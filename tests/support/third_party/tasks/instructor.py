"""instructor: a pydantic model by a call of a tool, by a JSON schema, and streamed in parts."""

import sys

import instructor
import openai
from pydantic import BaseModel


class City(BaseModel):
    name: str
    people: int


client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
ASKED = {"model": "parrot", "response_model": City, "max_retries": 0}
for mode, script in (
    (instructor.Mode.TOOLS, "city-call"),
    (instructor.Mode.TOOLS_STRICT, "city-call"),
    (instructor.Mode.JSON, "city"),
    (instructor.Mode.JSON_SCHEMA, "city"),
):
    patched = instructor.from_openai(client, mode=mode)
    messages = [{"role": "user", "content": f"Which city? script:{script}"}]
    city = patched.chat.completions.create(messages=messages, **ASKED)
    assert (city.name, city.people) == ("Paris", 2100000), (mode, city)
patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
messages = [{"role": "user", "content": "Which city? script:partial-city-call"}]  # it asks for a tool of that name
*_, city = patched.chat.completions.create_partial(messages=messages, **ASKED)
assert (city.name, city.people) == ("Paris", 2100000)
print("done")
