"""mini-swe-agent: it runs one command in a shell and submits."""

import os
import sys
import tempfile
from pathlib import Path

os.environ["MSWEA_SILENT_STARTUP"] = "1"
os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = tempfile.mkdtemp()
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

model = LitellmModel(
    model_name="openai/parrot",
    model_kwargs={"api_base": f"{sys.argv[1]}/v1", "api_key": "none", "drop_params": True},
)
folder = tempfile.mkdtemp()
agent = DefaultAgent(
    model,
    LocalEnvironment(cwd=folder),
    system_template="You write commands.",
    instance_template="{{task}}",
)
result = agent.run("Write a file. script:shell")
assert (Path(folder) / "note.txt").read_text() == "written\n", result
print("done")
