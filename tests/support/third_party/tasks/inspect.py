"""inspect-ai: an evaluation of two samples, one of which calls a tool, all right."""

import sys
import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def get_weather():
    async def execute(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        return "21 degrees"

    return execute


model = get_model("openai/parrot", base_url=f"{sys.argv[1]}/v1", api_key="none", responses_api=False)
samples = [
    Sample(input="script:hello", target="I am a model"),
    Sample(input="In Paris? script:weather", target="21 degrees in"),
]
task = Task(dataset=samples, solver=[use_tools(get_weather()), generate()], scorer=includes())
[log] = eval(task, model=model, log_dir=tempfile.mkdtemp(), display="none")
assert log.status == "success", log.error
assert [sample.scores["includes"].value for sample in log.samples] == ["C", "C"]
print("done")
