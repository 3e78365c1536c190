"""Client process of a benchmark, which gets its part of the load as one JSON line on stdin.

It is `python -m motley_bench.load.load_client_process`. It reports when it is ready, waits for a line with the
time to start, and answers with its outcome.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import sys
from collections.abc import Coroutine
from typing import Any

from motley.client import Tls

from ..processes.bench_child import respond
from .load_generator import LoadGenerator
from .load_workload import Workload, generate_requests
from .request_samples import LoadOutcome
from .sender_factory import create_sender


async def run_client_part(part: dict[str, Any]) -> LoadOutcome:
    """Run one client's part of a workload and return its outcome.

    part  workload, target, model, api_key, tls, alphabet, the client's index, and the number of clients
    """
    workload = Workload.from_json(part["workload"])
    index, clients = part["index"], part["clients"]
    mine = itertools.islice(generate_requests(workload, part["alphabet"]), index, None, clients)
    concurrency = len(range(index, workload.concurrency, clients))
    tls = None if part["tls"] is None else Tls(**part["tls"])
    service = create_sender(workload, part["target"], part["model"], part["api_key"], tls)
    try:
        respond({"ready": True})
        started = float(await asyncio.to_thread(sys.stdin.readline))
        return await LoadGenerator(workload, service, mine, started).run(concurrency)
    finally:
        await service.close()


def main() -> None:
    part = json.loads(sys.stdin.readline())
    gc.freeze()  # the garbage collector need not visit imported objects again and again
    respond(run_on_fastest_loop(run_client_part(part)).to_json())


def run_on_fastest_loop(work: Coroutine[Any, Any, LoadOutcome]) -> LoadOutcome:
    """Run a coroutine on uvloop's event loop if it is installed, since a client should use as little CPU as it can."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


if __name__ == "__main__":
    main()
