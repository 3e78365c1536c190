"""llm, the command line: streamed, whole, with a schema, with a tool, and an embedding."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = """
- model_id: parrot
  model_name: parrot
  api_base: {url}/v1
  supports_schema: true
  supports_tools: true
"""
TOOL = 'def get_weather(city: str) -> str:\n    "The weather of a city."\n    return "21 degrees"\n'
folder = Path(tempfile.mkdtemp())
(folder / "extra-openai-models.yaml").write_text(MODEL.format(url=sys.argv[1]))


def llm(*arguments):
    command = [str(Path(sys.executable).with_name("llm")), *arguments, "-m", "parrot"]
    environment = {**os.environ, "LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


assert llm("Greet. script:hello").startswith("Hello, I am a model")
assert llm("Greet. script:hello", "--no-stream").startswith("Hello, I am a model")
assert json.loads(llm("Which city? script:city", "--schema", "name, people int")) == {
    "name": "Paris",
    "people": 2100000,
}
said = llm("What is the weather in Paris? script:weather", "--functions", TOOL)
assert said.endswith("It is 21 degrees in Paris."), said
print("done")
