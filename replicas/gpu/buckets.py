"""Sizes that graphs are captured at. A step runs in the smallest that holds it, padded."""

from __future__ import annotations

from bisect import bisect_left

from ...kernels.launch.kernel_operation import SHORTEST_CONTEXT, pad_graph_rows

_DRAFTED = 64  # rows up to which steps with drafts are graphs, where more sequences than that have none either


def graph_rows(max_running: int, max_drafts: int) -> int:
    """The most rows of a graph. A step of more with drafts runs as it comes: logits of each size take memory."""
    return max(max_running, min(max_running * (1 + max_drafts), _DRAFTED))


def batch_sizes(most: int) -> tuple[int, ...]:
    """Those of `pad_graph_rows`, by which layers choose their kernels; the last is `most`."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(pad_graph_rows(sizes[-1] + 1))
    return (*sizes[:-1], most)


def context_sizes(longest: int) -> tuple[int, ...]:
    """Powers of two from 256; the last is `longest`."""
    sizes = [SHORTEST_CONTEXT]
    while sizes[-1] < longest:
        sizes.append(2 * sizes[-1])
    return (*(size for size in sizes if size < longest), longest)


def bucket(sizes: tuple[int, ...], number: int) -> int:
    """The smallest size that is not below `number`."""
    return sizes[bisect_left(sizes, number)]
