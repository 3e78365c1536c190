"""Configuration of one engine. Frozen: derived values are returned by the code that derives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .byte_sizes import MAX_SIZE
from .errors import InvalidRequest
from .short_repr import short_repr

if TYPE_CHECKING:  # importing the operators imports torch, which the service's other processes do not need
    from ..kernels.ops import CpuWeights, KvDtype, Numerics

PrefixCache = Literal["off", "memory"]
PrefixWire = Literal["int8", "float16", "bfloat16"]

MAX_SECONDS = 24 * 3600.0
MAX_COUNT = 2**31 - 1  # most tokens or sequences: the product of two counts fits into 64 bits
MAX_PARALLEL = 1024  # most ranks of a stage, and most stages
MAX_THREADS = 4096
MAX_DRAFTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    device                "cpu" or "cuda[:i]"; or one of these for each of the stages, such as "cuda:0,cpu"
    graphs                on a GPU, decode as CUDA graphs
    dtype                 dtype of activations: "auto", "float32", "bfloat16", "float16"
    numerics              "exact": a batch, a chunk or a prefix hit never changes a token; "fast": kernels may
                          switch by batch size, within their stated bounds. None: exact on a CPU, fast on a GPU
    kv_dtype              "int8": KV is rounded to one byte per number. None: the dtype of activations
    cpu_weights           which copies of int4 weights a CPU keeps; None lets the operator table choose
    max_model_len         most tokens of prompt and output together; None: what the model was made for
    max_batch_tokens      most tokens computed per step, prefill chunks and decodes together
    max_running           most sequences in one step
    kv_memory_bytes       memory for KV; None: a share of free memory
    swap_memory_bytes     host memory for KV of preempted sequences, where copying is faster than computing again; 0:
                          none. None: 4 GiB for a GPU, at most a quarter of free memory; none for a CPU
    tensor_parallel       ranks that every layer is divided among, each a process with a share of the threads, or with a
                          GPU of its own: those after `device`, unless the launcher places them otherwise
    pipeline_parallel     stages that have some of the layers each, also a process or a GPU each; with both settings,
                          each stage has `tensor_parallel` ranks
    pipeline_layers       how many layers each stage has. None: chosen automatically
    speculate_ngram       draft tokens of a sequence that a step tries beyond its last, taken from what followed the
                          same tokens before; 0: none. Tokens then come several at a time; with exact numerics they are
                          the same
    drafter               what proposes these tokens, by its name in engine/drafting: "ngram"
    reuse_prefixes        find prompts' prefixes in the KV of earlier requests
    prefix_cache          "memory": KV of prompts' prefixes is kept in host memory too, sealed, and found there when the
                          device has lost it. Stores that replicas share are passed in by the code that builds the
                          engine
    prefix_cache_bytes    size of that memory
    prefix_buffer_bytes   host memory for KV on its way to and from a store. None: 256 MiB, 1 GiB for a GPU; at most an
                          eighth of free memory
    prefix_wire           dtype in which a store keeps KV, rounded where that is smaller than KV's own. None: KV's own.
                          Engines that are to share between numerics classes must agree on it
    prefix_after          how many requests must have had a prefix before it is stored
    prefix_any_numerics   use KV that other numerics classes have computed: what follows may then differ in its last
                          digits, and so in its tokens, from what this engine computes without a store
    max_waiting_tokens    prompt tokens admitted and not yet started; beyond that requests are refused
    max_waiting           requests admitted and not yet started
    weights_cache         folder of weights as kernels hold them, so that the next start need not repack them; "off":
                          none. None: motley/weights in the user's cache folder (XDG_CACHE_HOME)
    weights_memory_bytes  memory for weights on the device: layers beyond it stay in the file of the weights cache, or
                          for a GPU in host memory, and are read or copied for every step, one layer ahead. None: all
                          are there
    weights_host_memory_bytes  pinned host memory for layers that do not fit on a GPU; layers beyond it are read from
                               disk.
                          None: available memory, less a quarter or 2 GiB
    threads               CPU threads; None: all cores this process may use
    watchdog_s            a step longer than this makes the replica unhealthy and ends its streams
    frozen_weights        names of tensors that no update of the weights may change, as patterns: model.embed_tokens.*
    reader_timeout_s      a stream is ended if its client reads nothing for this many seconds
    """

    device: str = "cpu"
    graphs: bool = True
    dtype: str = "auto"
    numerics: Numerics | None = None
    kv_dtype: KvDtype | None = None
    cpu_weights: CpuWeights | None = None
    max_model_len: int | None = None
    max_batch_tokens: int = 512
    max_running: int = 64
    kv_memory_bytes: int | None = None
    swap_memory_bytes: int | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    pipeline_layers: tuple[int, ...] | None = None
    speculate_ngram: int = 0
    drafter: str = "ngram"
    reuse_prefixes: bool = True
    prefix_cache: PrefixCache = "off"
    prefix_cache_bytes: int = 2**30
    prefix_buffer_bytes: int | None = None
    prefix_wire: PrefixWire | None = None
    prefix_after: int = 2
    prefix_any_numerics: bool = False
    max_waiting_tokens: int = 262_144
    max_waiting: int = 512
    weights_cache: str | None = None
    weights_memory_bytes: int | None = None
    weights_host_memory_bytes: int | None = None
    threads: int | None = None
    watchdog_s: float = 60.0
    reader_timeout_s: float = 30.0
    frozen_weights: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _check_one_of("numerics", self.numerics, (None, "exact", "fast"))
        _check_one_of("kv_dtype", self.kv_dtype, (None, "int8"))
        _check_one_of("cpu_weights", self.cpu_weights, (None, "int4", "int8", "both", "dense"))
        _check_one_of("prefix_cache", self.prefix_cache, ("off", "memory"))
        _check_one_of("prefix_wire", self.prefix_wire, (None, "int8", "float16", "bfloat16"))
        for name in ("max_batch_tokens", "max_running", "max_waiting_tokens", "max_waiting"):
            _check_positive(name, getattr(self, name))
        _check_positive("prefix_cache_bytes", self.prefix_cache_bytes, MAX_SIZE)
        _check_positive("prefix_after", self.prefix_after)
        for name in ("tensor_parallel", "pipeline_parallel"):
            _check_positive(name, getattr(self, name), MAX_PARALLEL)
        sizes = ("kv_memory_bytes", "prefix_buffer_bytes", "weights_memory_bytes", "weights_host_memory_bytes")
        bounds = {"max_model_len": MAX_COUNT, "threads": MAX_THREADS} | dict.fromkeys(sizes, MAX_SIZE)
        for name, maximum in bounds.items():
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name), maximum)
        if self.device.count(",") not in (0, self.pipeline_parallel - 1):
            raise _invalid_setting(
                "device", self.device, f"a device, or one for each of {self.pipeline_parallel} stages"
            )
        if self.pipeline_layers is not None:
            _check_layers(self.pipeline_layers, self.pipeline_parallel)
        if self.swap_memory_bytes is not None:
            _check_not_negative("swap_memory_bytes", self.swap_memory_bytes)
        if type(self.speculate_ngram) is not int or not 0 <= self.speculate_ngram <= MAX_DRAFTS:
            raise _invalid_setting("speculate_ngram", self.speculate_ngram, f"an integer from 0 to {MAX_DRAFTS}")
        if not isinstance(self.drafter, str):
            raise _invalid_setting("drafter", self.drafter, "the name of a drafter")
        if isinstance(self.frozen_weights, str) or not all(isinstance(one, str) and one for one in self.frozen_weights):
            raise _invalid_setting("frozen_weights", self.frozen_weights, "patterns of tensors' names")
        object.__setattr__(self, "frozen_weights", tuple(self.frozen_weights))  # JSON has lists
        for name in ("watchdog_s", "reader_timeout_s"):
            _check_seconds(name, getattr(self, name))
        if self.weights_cache is not None and (not isinstance(self.weights_cache, str) or not self.weights_cache):
            raise _invalid_setting("weights_cache", self.weights_cache, "a folder or 'off'")
        if self.weights_memory_bytes is not None:
            self._check_tiers()
        elif self.weights_host_memory_bytes is not None:
            host_bytes = self.weights_host_memory_bytes
            raise _invalid_setting(
                "weights_host_memory_bytes", host_bytes, "null without weights_memory_bytes: all are on the device"
            )
        if self.max_batch_tokens < self.max_running:
            # Every running sequence must be able to decode in every step.
            raise _invalid_setting(
                "max_batch_tokens", self.max_batch_tokens, f"at least max_running ({self.max_running})"
            )

    def _check_tiers(self) -> None:
        """Raise InvalidRequest where layers would be kept off the device though the model is divided, or has no cached
        file.
        """
        for name in ("tensor_parallel", "pipeline_parallel"):
            if getattr(self, name) > 1:
                raise _invalid_setting(
                    name, getattr(self, name), "1 with weights_memory_bytes: parts of a model stay in memory"
                )
        if self.weights_cache == "off":
            raise _invalid_setting(
                "weights_cache", "off", "a folder with weights_memory_bytes: layers are read from its file"
            )


def _invalid_setting(name: str, value: object, accepted: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {short_repr(value)} is not accepted; expected {accepted}", param=name)


def _check_one_of(name: str, value: object, accepted: tuple[object, ...]) -> None:
    if value not in accepted:
        raise _invalid_setting(name, value, " or ".join(map(repr, accepted)))


def _check_positive(name: str, value: object, maximum: int = MAX_COUNT) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
        raise _invalid_setting(name, value, f"a positive integer, at most {maximum}")


def _check_layers(value: object, stages: int) -> None:
    if not (
        isinstance(value, tuple)
        and len(value) == stages
        and all(type(each) is int and 0 < each <= MAX_COUNT for each in value)
    ):
        raise _invalid_setting("pipeline_layers", value, f"a positive integer for each of {stages} stages")


def _check_not_negative(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SIZE:
        raise _invalid_setting(name, value, f"an integer from 0 to {MAX_SIZE}")


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_SECONDS:
        raise _invalid_setting(name, value, f"seconds, above 0 and at most {MAX_SECONDS:g}")
