"""langchain-community's VLLMOpenAI, and its batches of prompts."""

import sys

from langchain_community.llms import VLLMOpenAI

SAID = "Hello, I am a model of one layer, and I say what I was told to say."
llm = VLLMOpenAI(
    openai_api_key="none",
    openai_api_base=f"{sys.argv[1]}/v1",
    model_name="parrot",
    max_tokens=64,
    model_kwargs={"stop": ["."]},
    max_retries=0,
)
assert llm.invoke("Greet.<|hello-0|>") == SAID[:-1]
assert [one[0].text for one in llm.generate(["Greet.<|hello-0|>", "Again.<|hello-0|>"]).generations] == [SAID[:-1]] * 2
assert "".join(llm.stream("Greet.<|hello-0|>")) == SAID[:-1]
print("done")
