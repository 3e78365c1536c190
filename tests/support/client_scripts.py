"""Texts that the model of the clients' tests says, by name: see script_checkpoint. One turn, or one for each answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


WEATHER = (call("get_weather", '{"city": "Paris"}'), "It is 21 degrees in Paris.")
CITY = '{"name": "Paris", "people": 2100000}'

SCRIPTS: Mapping[str, Sequence[str]] = {
    "weather": WEATHER,
    "handoff": (call("transfer_to_weather", "{}"), *WEATHER),
    "city-call": (call("City", CITY),),
    "partial-city-call": (call("PartialCity", CITY),),
    "city": (CITY,),
    "plugin": (call("weather-get_weather", '{"city": "Paris"}'), "It is 21 degrees in Paris."),
    "final-result": (call("final_result", CITY),),
    "return-city": (call("return_city", CITY),),
    "final-answer": (WEATHER[0], call("final_answer", '{"answer": "It is 21 degrees in Paris."}')),
    "code": ("Thought: I ask.\n<code>\nfinal_answer('It is ' + get_weather('Paris') + ' in Paris.')\n</code>",),
    "dspy-plain": ("[[ ## answer ## ]]\nIt is 21 degrees in Paris.\n\n[[ ## completed ## ]]",),
    "dspy-thought": (
        "[[ ## reasoning ## ]]\nThe tool says so.\n\n[[ ## answer ## ]]\nIt is 21 degrees in Paris.\n\n"
        "[[ ## completed ## ]]",
    ),
    "shell": (
        call("bash", '{"command": "echo written > note.txt"}'),
        call("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}'),
    ),
    "edit": ("greet.py\n```python\n<<<<<<< SEARCH\nprint('hello')\n=======\nprint('bye')\n>>>>>>> REPLACE\n```\n",),
    "hello": ("Hello, I am a model of one layer, and I say what I was told to say.",),
}
