"""Setup of swapping for an engine: host memory, and rates measured on the device at hand."""

from __future__ import annotations

from collections.abc import Callable

from ....kernels.ops import Ops
from ...engine_config import EngineConfig
from ...errors import InvalidRequest
from ...execution.copier import Copier
from ...execution.swapper import Swapper
from ...host.host_memory import free_memory
from ...kv.memory_budget import swap_budget
from ...types import BLOCK_TOKENS
from ..kv_reuse.swap_planner import SwapPlanner, SwapRates


def build_swapper(
    config: EngineConfig,
    ops: Ops,
    block_bytes: int,
    make: Callable[[int], Swapper],
    copier: Copier,
    max_blocks: int,
    lent: int = 0,
) -> tuple[Swapper | None, str]:
    """Return a swapper with host memory for at most `max_blocks` blocks and `lent` more, or None; and why it has that
    many. Raises InvalidRequest if the configured memory cannot be had.

    block_bytes  bytes of a block, in all processes of the model together
    make         makes a swapper with that many blocks
    lent         further blocks, for other uses
    """
    nbytes, why = swap_budget(config.swap_memory_bytes, free_memory(), on_gpu=ops.device.type != "cpu")
    if not nbytes and not lent:
        return None, f"by computing again: {why}"
    blocks = min(nbytes // block_bytes, max_blocks)
    try:
        if nbytes and not blocks:
            raise RuntimeError(f"there is no room for one KV block, which takes {block_bytes} bytes")
        swapper = make(blocks + lent)
    except RuntimeError as error:  # the host does not pin so much, above all
        failure = str(error)
    else:
        if not blocks:
            return swapper, f"by computing again: {why}"
        return swapper, f"{blocks} blocks on the host, {blocks * block_bytes / 2**20:.0f} MiB: {why}"
    copier.trim()  # frees what was pinned before the failure
    if config.swap_memory_bytes is None:
        return None, f"by computing again: {failure}"
    raise InvalidRequest(f"swap_memory_bytes: {failure}", param="swap_memory_bytes")


def measure_swap_rates(swap: SwapPlanner, swapper: Swapper, token_s: float) -> str:
    """Measure copies to and from the host, by which `swap` then chooses copying or recomputing; return them in words.

    token_s  seconds to compute one token of a prompt
    """
    out_s, in_s = swapper.measure()
    swap.rates = SwapRates(out_s, in_s, token_s)
    compute_s = BLOCK_TOKENS * token_s
    took = f"{1e3 * out_s:.3g} ms out and {1e3 * in_s:.3g} ms in, {1e3 * compute_s:.3g} ms to compute"
    chosen = "copied" if swap.rates.prefers_copy(1, 0, BLOCK_TOKENS) else "computed again"
    return f"a block takes {took}: {chosen}, where there is room"
