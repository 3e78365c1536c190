"""outlines: a typed answer and a choice, by openai and by its vLLM client."""

import sys
from typing import Literal

import openai
import outlines
from pydantic import BaseModel


class City(BaseModel):
    name: str
    people: int


client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
for model in (outlines.from_openai(client, "parrot"), outlines.from_vllm(client, "parrot")):
    text = model("Which city? script:city", City)
    assert City.model_validate_json(text) == City(name="Paris", people=2100000)
vllm = outlines.from_vllm(client, "parrot")
assert vllm("Which? script:city", Literal["yes", "no"]) in ("yes", "no")
assert vllm("Which? script:city", outlines.regex("[ab]{3}"), max_tokens=8)
print("done")
