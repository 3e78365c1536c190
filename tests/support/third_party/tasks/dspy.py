"""dspy: a prediction, one with a chain of thought, and JSON."""

import sys

import dspy

SAID = "It is 21 degrees in Paris."
model = dspy.LM("openai/parrot", api_base=f"{sys.argv[1]}/v1", api_key="none", cache=False, num_retries=0)
dspy.configure(lm=model)
assert dspy.Predict("question -> answer")(question="script:dspy-plain").answer == SAID
found = dspy.ChainOfThought("question -> answer")(question="script:dspy-thought")
assert (found.reasoning, found.answer) == ("The tool says so.", SAID)
with dspy.context(adapter=dspy.JSONAdapter()):
    found = dspy.Predict("question -> name: str, people: int")(question="script:city")
    assert (found.name, found.people) == ("Paris", 2100000)
print("done")
