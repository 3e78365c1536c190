"""What is done beside each other by a few threads, each of which computes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

__all__ = ["side_by_side"]

MOST = 4  # each has what it works on in memory


def side_by_side(tasks: Sequence[Callable[[], Any]], most: int = MOST) -> list[Any]:
    """Their results. Raises what the first that fails raises, and begins no other.

    torch divides every operator among its threads, which wait for each other as many times: beside other processes
    on the same cores that took twenty times as long as one thread each.
    """
    threads = torch.get_num_threads()
    if min(threads, most) == 1:
        return [task() for task in tasks]
    pool = ThreadPoolExecutor(min(threads, most), "loads", initializer=partial(torch.set_num_threads, 1))
    try:
        return [future.result() for future in [pool.submit(task) for task in tasks]]
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # for the threads that are yet to come
