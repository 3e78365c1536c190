"""aider, the command line: it asks for one edit of a file, makes it and commits it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
for key, value in (("user.name", "a"), ("user.email", "a@b.invalid")):
    subprocess.run(["git", "config", key, value], cwd=folder, check=True)
(folder / "greet.py").write_text("print('hello')\n")
environment = {**os.environ, "HOME": str(folder), "OPENAI_API_KEY": "none", "OPENAI_API_BASE": f"{sys.argv[1]}/v1"}
environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
command = [str(Path(sys.executable).with_name("aider")), "--model", "openai/parrot", "--edit-format", "diff"]
command += ["--yes-always", "--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-pretty"]
command += ["--map-tokens", "0", "--weak-model", "openai/parrot", "--message", "Say bye. script:edit", "greet.py"]
result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
assert (folder / "greet.py").read_text() == "print('bye')\n", result.stdout + result.stderr
log = subprocess.run(["git", "log", "--oneline"], cwd=folder, capture_output=True, text=True, check=True).stdout
assert len(log.splitlines()) == 2, log
print("done")
