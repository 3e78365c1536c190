"""Parallel execution of tasks by a few threads, each of which computes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

MAX_TASK_THREADS = 4  # most threads, since each holds its task's data in memory


def run_in_threads(tasks: Sequence[Callable[[], Any]], max_threads: int = MAX_TASK_THREADS) -> list[Any]:
    """Run the tasks in parallel and return their results. Raises the error of the first that fails, and begins no other
    task.

    torch divides every operator among its threads, which wait for each other as often: beside other processes
    on the same cores that took twenty times as long as one thread each.
    """
    threads = torch.get_num_threads()
    if min(threads, max_threads) == 1:
        return [task() for task in tasks]
    pool = ThreadPoolExecutor(min(threads, max_threads), "loads", initializer=partial(torch.set_num_threads, 1))
    try:
        return [future.result() for future in [pool.submit(task) for task in tasks]]
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # for threads that are started later
