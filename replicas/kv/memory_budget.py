"""Memory of a device by part, and what is left of it for KV: computed, not measured."""

from __future__ import annotations

from dataclasses import dataclass

from ..gpu.device_state import history_dtype
from ..gpu.graph_buckets import MAX_GRAPHS, batch_size_totals, context_sizes
from ..gpu.top_logprobs import PROMPT_ROWS
from ..model.model_config import ModelConfig
from ..model.rotary_embedding import RotaryTable
from ..types import BLOCK_TOKENS

__all__ = [
    "CONTEXT_BYTES", "CPU_KV_SHARE", "HISTOGRAM_BYTES", "USABLE_SHARE", "KvBudget", "MemoryParts",
    "activation_bytes", "copied_rows", "cpu_kv_budget", "graph_bytes",
    "history_bytes", "host_weights_budget", "kv_budget", "reserve_bytes",
    "swap_budget", "table_bytes",
]  # fmt: skip

# Usable share of the memory on a datasheet: ECC and the driver take up to a twelfth (torch finds 14.75 GiB on a T4).
USABLE_SHARE = 0.92
CPU_KV_SHARE = 0.25  # share of the memory that is free once the weights are loaded

SWAP_BYTES, SWAP_SHARE = 4 << 30, 0.25  # default for KV on the host, and its largest share of free host memory

# Allowances, not measured: for a CUDA context with cuBLAS and its workspace, and for one launch in a CUDA graph.
CONTEXT_BYTES = 600 << 20
_LAUNCH_BYTES = 16 << 10
_LAUNCHES_PER_LAYER = 10
HISTOGRAM_BYTES = 8 * 1024 * 8  # bytes that sampling on a device fills for each row if any has top_k or top_p
_RESERVE_SHARE, _RESERVE_BYTES = 0.03, 256 << 20
_PREFIX_BYTES = {False: 2**28, True: 2**30}  # host memory for KV to and from a store, by whether on a GPU
_PREFIX_SHARE = 8  # that memory is at most one in this many free bytes
# Free host memory that weights of a GPU leave, since no other process can use pinned memory.
_HOST_MARGIN_SHARE, _HOST_MARGIN_BYTES = 0.25, 2 << 30


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes of a device's memory by part.

    weights      embedding, layers, norms and head, all copies counted
    metadata     quantization metadata: scales, zero points, orders of inputs
    kv_block     one KV block, in all layers
    activations  activations of the largest step, what kernels write beside them, histories for penalties, tables of
                 positions and blocks, and the block that padding is written to
    graphs       CUDA graphs
    context      CUDA context and libraries
    staging      KV blocks that are put together on their way to the host and back
    host         pinned host memory for KV of preempted sequences
    buffers      host memory for KV on its way to and from a prefix store; pinned, except for a CPU
    """

    weights: int
    metadata: int
    kv_block: int
    activations: int
    graphs: int = 0
    context: int = 0
    staging: int = 0
    host: int = 0
    buffers: int = 0

    @property
    def loaded(self) -> int:
        return self.weights + self.metadata

    def kv_tokens(self, tokens: int) -> int:
        """Return the bytes of KV of that many tokens."""
        return self.kv_block * tokens // BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class KvBudget:
    """Memory for KV, and why it is that much. `missing`: bytes that the other parts need beyond what there is."""

    nbytes: int
    missing: int
    why: str

    def blocks(self, block_bytes: int) -> int:
        return self.nbytes // block_bytes


def kv_budget(free: int, total: int, parts: MemoryParts, reserve: int | None = None) -> KvBudget:
    """Return the KV budget of a GPU: free memory after loading, less activations, graphs, staging and a reserve.

    free     free bytes with the context made and the weights loaded; below 0 where they do not fit
    total    bytes of the device's memory
    reserve  bytes for the allocator's gaps and for other users of the device; None: 3% of `total`, at least 256 MiB
    """
    reserve = reserve_bytes(total) if reserve is None else reserve
    left = free - parts.activations - parts.graphs - parts.staging - reserve
    why = (
        f"{_mib(free)} free after the weights, less {_mib(parts.activations)} for activations, {_mib(parts.graphs)} "
        f"for graphs, {_mib(parts.staging)} for copies to the host and {_mib(reserve)} in reserve"
    )
    return KvBudget(max(0, left), max(0, -left), why)


def cpu_kv_budget(free: int) -> KvBudget:
    """Return the KV budget of a CPU, whose memory others use too: a share of what is free once the weights are
    loaded.
    """
    return KvBudget(max(0, int(free * CPU_KV_SHARE)), max(0, -free), f"{CPU_KV_SHARE:.0%} of free memory")


def swap_budget(configured: int | None, free: int, *, on_gpu: bool) -> tuple[int, str]:
    """Return the bytes of host memory for KV of preempted sequences, and why. `free`: free bytes of the host."""
    if configured is not None:
        return configured, "as configured"
    if not on_gpu:
        return 0, "a CPU's KV lies in the host's memory anyway"
    share = int(free * SWAP_SHARE)
    return (SWAP_BYTES, "the default") if share >= SWAP_BYTES else (share, f"{SWAP_SHARE:.0%} of its free memory")


def host_weights_budget(configured: int | None, free: int) -> tuple[int, str]:
    """Return the bytes of host memory for weights that do not fit on a GPU, and why. `free`: free bytes of the host."""
    if configured is not None:
        return configured, "as configured"
    margin = max(int(free * _HOST_MARGIN_SHARE), _HOST_MARGIN_BYTES)
    return max(0, free - margin), f"{_mib(free)} are free, less {_mib(margin)} for KV, files and others"


def prefix_budget(configured: int | None, free: int, min_bytes: int, *, on_gpu: bool) -> int:
    """Return the bytes of host memory for KV on its way to and from a prefix store. least: two values, one each way."""
    if configured is not None:
        return configured
    return max(min(_PREFIX_BYTES[on_gpu], free // _PREFIX_SHARE), min_bytes)


def reserve_bytes(total: int) -> int:
    return max(_RESERVE_BYTES, int(total * _RESERVE_SHARE))


def activation_bytes(config: ModelConfig, itemsize: int, tokens: int, rows: int, copied: int | None = None) -> int:
    """Return the bytes that are alive at once in a step of `tokens` tokens, of which `rows` get logits.

    itemsize  bytes of an activation
    copied    rows of logits that are copied while tokens are chosen; None: as many as `rows`
    """
    layer = max(plan.live_values for plan in config.layers)
    rope = 4 * config.rotary_dim  # cosines and sines in fp32
    logits = 4 * (rows + (rows if copied is None else copied)) * config.vocab_size  # fp32
    return tokens * (layer * itemsize + rope) + logits


def copied_rows(sampled: int) -> int:
    """Return the rows of logits that a device copies in a step without a graph that samples `sampled` rows.

    They are picked out, and copied once more under penalties and biases. At another time of the step, rows of a prompt
    are picked out and normalised.
    """
    return 2 * max(sampled, PROMPT_ROWS)


def history_bytes(config: ModelConfig, max_running: int) -> int:
    """Return the bytes of token histories for penalties, one for each row of the device's state. They are allocated
    when a request first needs them.
    """
    return (2 * max_running + 1) * config.vocab_size * history_dtype(config.max_model_len).itemsize


def table_bytes(config: ModelConfig, max_running: int) -> int:
    """Return the bytes that a device keeps beside weights: cosines and sines of all positions, and the block table of
    each row of its state.
    """
    positions = -(-config.max_model_len // RotaryTable.PIECE) * RotaryTable.PIECE
    blocks = -(-config.max_model_len // BLOCK_TOKENS)
    return positions * config.rotary_dim * 4 + (2 * max_running + 1) * blocks * 4


def graph_bytes(config: ModelConfig, itemsize: int, max_rows: int) -> int:
    """Return an allowance for CUDA graphs of decode with up to `max_rows` rows, which share one pool, and for logits of
    each batch size.

    As many graphs count as are kept, or fewer if there are fewer: 3 kinds for each batch size and context length.
    """
    num_sizes, sum_of_sizes = batch_size_totals(max_rows)
    graphs = min(MAX_GRAPHS, 3 * num_sizes * len(context_sizes(config.max_model_len)))
    launches = config.num_layers * _LAUNCHES_PER_LAYER
    logits = 4 * config.vocab_size * sum_of_sizes
    step = activation_bytes(config, itemsize, max_rows, max_rows) + max_rows * HISTOGRAM_BYTES
    return step + logits + graphs * launches * _LAUNCH_BYTES


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"
