"""Sizes at which CUDA graphs are captured. A step runs in the smallest graph that holds it, padded."""

from __future__ import annotations

from bisect import bisect_left

from ...kernels.launch.kernel_operation import SHORTEST_CONTEXT, pad_graph_rows

MAX_GRAPHS = 32  # most CUDA graphs that are kept at a time
_EVEN_FROM = 128  # rows from which sizes of graphs have equal distances
_MAX_DRAFTED_ROWS = 64  # most rows of graphs for steps with drafts, unless steps without drafts have more rows


def graph_rows(max_running: int, max_drafts: int) -> int:
    """Return the most rows of a graph. Larger steps with drafts run without one, since logits of each size take
    memory.
    """
    return max(max_running, min(max_running * (1 + max_drafts), _MAX_DRAFTED_ROWS))


def batch_sizes(max_size: int) -> tuple[int, ...]:
    """Return the batch sizes of CUDA graphs up to `max_size`: those of `pad_graph_rows`, by which layers choose kernels
    too.
    """
    sizes = [1]
    while sizes[-1] < max_size:
        sizes.append(pad_graph_rows(sizes[-1] + 1))
    return (*sizes[:-1], max_size)


def batch_size_totals(max_size: int) -> tuple[int, int]:
    """Return how many numbers `batch_sizes` has, and their sum, without a list: `max_size` may be as large as a flag
    lets it be.
    """
    if max_size <= _EVEN_FROM:
        sizes = batch_sizes(max_size)
        return len(sizes), sum(sizes)
    step = pad_graph_rows(_EVEN_FROM + 1) - _EVEN_FROM
    count, total = batch_size_totals(_EVEN_FROM)
    between = range(_EVEN_FROM + step, max_size, step)
    return count + len(between) + 1, total + len(between) * (
        between.start + between[-1] if between else 0
    ) // 2 + max_size


def context_sizes(longest: int) -> tuple[int, ...]:
    """Return the context lengths of graphs: powers of two from 256, and `longest` as the last."""
    sizes = [SHORTEST_CONTEXT]
    while sizes[-1] < longest:
        sizes.append(2 * sizes[-1])
    return (*(size for size in sizes if size < longest), longest)


def smallest_bucket(sizes: tuple[int, ...], number: int) -> int:
    """Return the smallest of these ascending sizes that is at least `number`."""
    return sizes[bisect_left(sizes, number)]
