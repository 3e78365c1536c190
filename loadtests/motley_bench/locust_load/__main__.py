"""`make loadtest`: two minutes of every protocol's users on a fleet that this machine can carry, and a report.

The fleet is `deploy/examples/laptop.yaml`, whose GPUs are simulated. What is given here goes to Locust: `-u 50 -t 5m`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ..load.measured_service import start_service

ROOT = Path(__file__).resolve().parents[3]
REPORT = ROOT / "build" / "loadtest.html"
USERS = ("-u", "12", "-t", "2m", "--shape", "burst", "--prompt-tokens", "lognormal:64:0.6", "--output-tokens", "64")


def main(arguments: list[str]) -> int:
    """Start the fleet, run Locust against it, and return Locust's exit status: 1 where a request failed."""
    REPORT.parent.mkdir(exist_ok=True)
    with start_service([str(ROOT / "deploy" / "examples" / "laptop.yaml")]) as endpoints:
        command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtests" / "locustfile.py"), "--headless"]
        command += ["--host", endpoints["http"], "--grpc-host", endpoints["grpc"], "--html", str(REPORT)]
        status = subprocess.run([*command, *USERS, *arguments], check=False).returncode
    print(f"report: {REPORT}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
