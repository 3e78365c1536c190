"""Run by guidellm's own interpreter: a benchmark, as it is published, of a service; prints how many requests failed."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, model, tokenizer = sys.argv[1:]
environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
with tempfile.TemporaryDirectory() as folder:
    report = Path(folder) / "report.json"
    for kind in ("/v1/chat/completions", "/v1/completions"):
        command = [
            str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console",
            "--backend", f"kind=openai_http,target={url},model={model},request_format={kind}",
            "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=12",
            "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
            "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
            "--output", f"kind=json,path={report}",
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
        [benchmark] = json.loads(report.read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        print(f"{kind}: {totals['successful']} answered, {totals['errored']} failed")
