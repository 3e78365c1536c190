"""Side of a benchmark without the service: one worker in a process with its readers, under the same load.

The process is `python -m motley_bench.service.bare_worker MODEL real|null`; it reads one workload per line from stdin
and writes the outcome to stdout.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from motley.replicas.engine.entrypoints.null_engine import NullWorker
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine_config import EngineConfig
from motley.replicas.types import Request, SamplingParams

from ..load.load_generator import LoadGenerator
from ..load.load_workload import LoadRequest, Workload, generate_requests
from ..load.request_samples import LoadOutcome
from ..processes.bench_child import BenchChild, respond

KV_BYTES = 512 << 20


class WorkerSender:
    """Sender whose requests go directly to a worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._numbers = itertools.count()

    async def stream(self, job: LoadRequest, on_message: Callable[[], None]) -> int:
        tokens = 0
        async for message in self._worker.generate(self._request(job)):
            if message.deltas:
                on_message()
                tokens += sum(len(delta.token_ids) for delta in message.deltas)
        return tokens

    async def whole(self, job: LoadRequest) -> int:
        return await self.stream(job, lambda: None)

    async def close(self) -> None:
        await self._worker.close()

    def _request(self, job: LoadRequest) -> Request:
        sampling = SamplingParams(max_tokens=job.output_tokens, ignore_eos=True, temperature=0.0, seed=0)
        return Request(f"bare {next(self._numbers)}", job.prompt_ids, sampling)


class BareWorkerProcess:
    """Handle of the process with the bare worker, for its parent, as a context manager."""

    def __init__(self, model: str, *, null: bool) -> None:
        self._child = BenchChild("motley_bench.service.bare_worker", model, "null" if null else "real")

    def __enter__(self) -> BareWorkerProcess:
        self._child.read()  # it is ready
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._child.__exit__(*exc_info)

    def run(self, workload: Workload, alphabet: tuple[int, ...]) -> LoadOutcome:
        self._child.write({"workload": workload.to_json(), "alphabet": alphabet})
        return LoadOutcome.from_json(self._child.read())


async def serve_workloads(model: str, *, null: bool) -> None:
    # Two engines share this machine's memory, and without a limit one would take all that is free.
    worker = NullWorker(model, EngineConfig()) if null else Worker(model, EngineConfig(kv_memory_bytes=KV_BYTES))
    await worker.start()
    respond({"ready": True})
    while line := await asyncio.to_thread(sys.stdin.readline):
        respond((await _measure(worker, json.loads(line))).to_json())


async def _measure(worker: Worker, request: dict[str, Any]) -> LoadOutcome:
    workload = Workload.from_json(request["workload"])
    work = generate_requests(workload, request["alphabet"])
    return await LoadGenerator(workload, WorkerSender(worker), work, time.monotonic()).run(workload.concurrency)


if __name__ == "__main__":
    asyncio.run(serve_workloads(sys.argv[1], null=sys.argv[2] == "null"))
