"""Engines of a pool in a fleet file: their limits and settings, and the quantization of its model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ....replicas.engine_config import MAX_THREADS
from .value_types import Count, Size, Spec, Text, Timeout


class QuantizationSpec(Spec):
    """Quantization of one pool, where it differs from the model's own."""

    model: Text | None = None
    """The same model in another quantization: a folder or a Hugging Face id."""
    cpu_weights: Literal["int4", "int8", "both", "dense"] | None = None
    """Copies of int4 weights that a CPU keeps in memory."""


class EngineSpec(Spec):
    """Limits and settings of a pool's engines, as `motley serve` has them.

    Entries that are left out have its defaults.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    """Data type of activations."""
    numerics: Literal["exact", "fast"] | None = None
    """exact: batching never changes a token; fast: results may differ within stated bounds."""
    kv_dtype: Literal["int8"] | None = None
    """Data type of KV on a GPU: int8 takes half the memory, and rounds."""
    graphs: bool | None = None
    """Run decode steps as CUDA graphs on a GPU."""
    max_model_len: Count | None = None
    """Maximum number of tokens of a prompt and its output together."""
    max_batch_tokens: Count | None = None
    """Maximum number of tokens that are computed in one step."""
    max_running: Count | None = None
    """Maximum number of sequences that run at the same time."""
    max_waiting: Count | None = None
    """Maximum number of waiting requests; further ones are refused."""
    max_waiting_tokens: Count | None = None
    """Maximum number of prompt tokens of waiting requests; further requests are refused."""
    kv_memory: Size | None = None
    """Memory for KV, such as 2GiB."""
    swap_memory: Size | None = None
    """Host memory for the KV of preempted sequences; 0: none."""
    prefix_buffer: Size | None = None
    """Host memory that buffers prefixes on the way to and from the shared prefix cache."""
    speculate_ngram: int | None = Field(None, ge=0)
    """Maximum number of tokens to speculate in a step: those that followed the same tokens earlier; 0: none."""
    drafter: Text | None = None
    """What proposes the tokens to speculate on: `ngram`, those that followed the same tokens earlier."""
    weights_cache: str | None = None
    """Folder that keeps weights in the form that kernels need, for faster starts, or `off`; by default the user's cache
    folder."""
    weights_memory: Size | None = None
    """Device memory for weights. Layers beyond it are read in every step, from disk or from the host memory of a GPU.
    By default all weights stay on the device."""
    weights_host_memory: Size | None = None
    """Pinned host memory for layers that do not fit into a GPU's `weights_memory`; the rest is read from disk. By
    default most of the free memory."""
    threads: int | None = Field(None, ge=1, le=MAX_THREADS)
    """Number of CPU threads; by default all cores."""
    watchdog_s: Timeout | None = None
    """Seconds that a step may take before the replica counts as unhealthy."""
    frozen_weights: list[Text] | None = None
    """Tensors that no weight update may change, as name patterns such as model.embed_tokens.*"""


ENGINE_NAMES = {  # entries with another name in EngineConfig
    "kv_memory": "kv_memory_bytes",
    "swap_memory": "swap_memory_bytes",
    "prefix_buffer": "prefix_buffer_bytes",
    "weights_memory": "weights_memory_bytes",
    "weights_host_memory": "weights_host_memory_bytes",
}
