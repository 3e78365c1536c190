"""Run by lm_eval's own interpreter: its OpenAI completions backend on tasks in a folder, against a service."""

import json
import os
import sys
from pathlib import Path

url, model, folder, batch_size = sys.argv[1:]
os.environ |= {"HF_HOME": f"{folder}/cache", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

from lm_eval import simple_evaluate  # noqa: E402  it reads the environment
from lm_eval.tasks import TaskManager  # noqa: E402

results = simple_evaluate(
    model="local-completions",
    # max_retries: a refusal is an error, not to be tried again
    model_args=f"base_url={url}/v1/completions,model={model},num_concurrent=2,max_retries=1,max_length=2048",
    tasks=["choice", "generate", "perplexity"],
    task_manager=TaskManager(include_path=folder, include_defaults=False),
    batch_size=int(batch_size),
)
found = {"samples": results["samples"], "results": results["results"]}
(Path(folder) / "results.json").write_text(json.dumps(found, default=str))
print("done")
