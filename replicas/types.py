"""Border types: the data that crosses between the ingress, the replica and the engine.

Everything here is plain, frozen data that pickles and compares by value. What exists once per token is a named tuple,
which is made in a fifth of the time of a dataclass. A `Request` is validated by construction: code that holds one need
not check it again.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from ..kernels.device.precision import GEMM_ROWS
from .host.metric_fields import counter, gauge
from .sampling_params import SamplingParams

__all__ = [
    "BLOCK_TOKENS",
    "NULL_KIND",
    "PROFILED_BATCH_SIZES",
    "RATE_WINDOW_S",
    "CallId",
    "Delta",
    "FinishReason",
    "KvEvent",
    "KvEvents",
    "ModelInfo",
    "Pooling",
    "PromptLogprob",
    "PromptStoreStatus",
    "ReplicaLoad",
    "ReplicaProfile",
    "Request",
    "SamplingParams",
    "StreamMessage",
    "TokenLogprob",
    "WeightsStatus",
    "join_deltas",
    "sum_loads",
]

NULL_KIND = "null"  # value of device, numerics, family and similar fields for an engine that computes nothing
RATE_WINDOW_S = 10.0  # a replica's tokens per second are an average over this many seconds
# Batch sizes for which a profile has the time of a decode step; also on both sides of the few-row kernels' limit.
PROFILED_BATCH_SIZES = (1, 2, 4, 8, 16, 32, GEMM_ROWS, GEMM_ROWS + 1, 128, 256)
BLOCK_TOKENS = 16  # tokens per KV block: part of the protocol, since block hashes are shared


class FinishReason(enum.StrEnum):
    """Reason why a choice ended. Every admitted choice gets exactly one."""

    STOP = "stop"  # end-of-sequence id, stop id or stop string
    LENGTH = "length"  # max_tokens or the context is full
    CANCELLED = "cancelled"  # the consumer went away
    DEADLINE = "deadline"  # the request's deadline passed
    REPLICA_LOST = "replica_lost"  # the stream could not be continued here; the error says why
    ERROR = "error"  # the engine failed; the stream raises EngineFault


class Pooling(enum.StrEnum):
    """Kind of pooling: how a prompt's hidden states become one embedding vector; nothing is generated then."""

    LAST = "last"  # the hidden state of the last token
    MEAN = "mean"  # the mean of all tokens' hidden states


class TokenLogprob(NamedTuple):
    """Log-probability (natural log) of one token, with the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# Log-probability of one prompt token; None for the first token, which nothing predicts.
PromptLogprob = TokenLogprob | None


@dataclass(frozen=True, slots=True)
class Request:
    """One validated request for a replica's engine.

    prompt_ids    token ids of the prompt, at least one
    output_ids    per choice, the output so far, where a request is resumed; empty, or one tuple for each of
                  `sampling.n`
    sampling      its seed is always set (by the ingress), so that a resumed request repeats exactly
    deadline_s    seconds left, from the moment of sending; None: no deadline. A duration rather than a time of day,
                  since the clocks of two machines differ
    priority      requests of a higher priority run first
    tenant        the client's tenant; separates prefix caches and queues
    cache_salt    derived from the tenant by the ingress, never given by a client
    pooling       if set, the response is one embedding of the prompt, and no token
    client_id     the client's own name of the request; empty: it gave none
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    output_ids: tuple[tuple[int, ...], ...] = ()
    deadline_s: float | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: bytes = b""
    pooling: Pooling | None = None
    client_id: str = ""

    def __post_init__(self) -> None:
        assert self.prompt_ids, "a request has at least one prompt token"
        assert len(self.output_ids) in (0, self.sampling.n), "output_ids: none, or one per choice"
        assert self.pooling is None or (self.sampling.n == 1 and not self.output_ids), "a pooled request has no output"


class CallId(NamedTuple):
    """Identity of one call from an ingress to a replica: the last argument of every call."""

    ingress: str
    number: int


class Delta(NamedTuple):
    """Output of one choice that became ready since the choice's last delta.

    `text` may lag behind `token_ids` (incomplete UTF-8, a possible stop string) and never runs ahead of them.
    `finish_reason` is set on the last delta of the choice, and only there.
    `stop_reason`: the stop string or stop id that ended the choice, if one did.
    """

    index: int  # type: ignore[assignment]  # index of the choice; hides tuple's own method
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


def join_deltas(deltas: list[Delta]) -> Delta:
    """Join consecutive deltas of one choice into one delta."""
    if len(deltas) == 1:
        return deltas[0]
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return Delta(
        index=deltas[0].index,
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(item for group in logprobs for item in group) if logprobs else None,
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
    )


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Current load of a replica. Work is counted in tokens rather than requests, since prompts differ a
    thousandfold. Fields with metadata are also exported to Prometheus.
    """

    running: int = field(default=0, metadata=gauge("num_requests_running", "Sequences that the replica computes now"))
    waiting: int = field(
        default=0,
        metadata=gauge(
            "num_requests_waiting",
            "Sequences that have been admitted and wait for a place among the running ones",
        ),
    )
    queued_prefill_tokens: int = 0  # tokens still to be computed before their first output
    kv_blocks_free: int = field(  # or evictable
        default=0,
        metadata=gauge(
            "kv_cache_usage_perc",
            "Share of the KV cache's blocks that are in use, from 0 to 1",
            lambda load: (
                (load.kv_blocks_total - load.kv_blocks_free) / load.kv_blocks_total if load.kv_blocks_total else None
            ),
            is_mean=True,
        ),
    )
    kv_blocks_total: int = field(
        default=0,
        metadata=gauge(
            "cache_config_info",
            "1; its labels say how KV is divided: tokens of a block, and blocks of a replica",
            lambda load: {(str(BLOCK_TOKENS), str(load.kv_blocks_total)): 1.0},
            labels=("block_size", "num_gpu_blocks"),
            is_mean=True,
        ),
    )
    steps: int = 0  # steps that the engine has taken since its start
    max_running: int = 0  # sequences that may be in the running batch
    prompt_tokens: int = 0  # of the requests whose answers have begun
    queried_tokens: int = field(
        default=0,
        metadata=counter("prefix_cache_queries", "Prompt tokens that were looked up in the replica's own KV cache"),
    )
    cached_tokens: int = field(  # from the prefix store too
        default=0,
        metadata=counter(
            "prefix_cache_hits",
            "Prompt tokens that were found in the replica's own KV cache",
            lambda load: load.cached_tokens - load.external_hit_tokens,
        ),
    )
    generated_tokens_per_s: float = 0.0  # output tokens per second over the last RATE_WINDOW_S
    drafted_tokens: int = field(
        default=0,
        metadata=counter("spec_decode_num_draft_tokens", "Draft tokens that speculative decoding has tried"),
    )
    accepted_tokens: int = field(
        default=0,
        metadata=counter("spec_decode_num_accepted_tokens", "Draft tokens that the model has accepted"),
    )
    preemptions_swapped: int = field(
        default=0,
        metadata=counter("num_swaps", "Preemptions for which the sequence's KV was copied to the host's memory"),
    )
    preemptions_recomputed: int = field(  # those after which the sequence's KV was computed again
        default=0,
        metadata=counter(
            "num_preemptions",
            "Times that a running sequence lost its place to another one",
            lambda load: load.preemptions_swapped + load.preemptions_recomputed,
        ),
    )
    external_queried_tokens: int = 0  # prompt tokens that the prefix store was asked for since the start
    external_hit_tokens: int = 0  # prompt tokens whose KV came from the prefix store
    swapped: int = field(
        default=0,
        metadata=gauge("num_requests_swapped", "Sequences that wait, and whose KV is in the host's memory meanwhile"),
    )
    draining: bool = False  # refuses new requests; those that it has go on
    weights_version: int = 0  # version of the weights that new requests begin with: updates since the start
    weights_contents: str = ""  # hex digest of the weights, the same on every replica; empty: there are no weights


_NOT_SUMMED = ("draining", "weights_version", "weights_contents")


def sum_loads(loads: Iterable[ReplicaLoad]) -> ReplicaLoad:
    """Return the sum of several replicas' loads. It is draining if all of them are, and has the oldest weights among
    them.
    """
    each = list(loads)
    summed = {
        one.name: sum(getattr(load, one.name) for load in each)
        for one in fields(ReplicaLoad)
        if one.name not in _NOT_SUMMED
    }
    oldest = min(each, key=lambda load: load.weights_version, default=ReplicaLoad())
    return ReplicaLoad(
        **summed,
        draining=bool(each) and all(load.draining for load in each),
        weights_version=oldest.weights_version,
        weights_contents=oldest.weights_contents,
    )


@dataclass(frozen=True, slots=True)
class PromptStoreStatus:
    """State of one prompt in the prefix store that replicas share, as far as a replica knows it.

    tokens   leading prompt tokens that the store had when this replica last read or wrote them
    absent   position of the first token that the store did not have when this request asked; None: no such end was
             found
    token_s  seconds that fetching one token's KV takes here, as measured lately
    """

    tokens: int
    absent: int | None = None
    token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WeightsStatus:
    """Published state of a replica's weights. version: updates since the checkpoint; contents: hex digest of all
    weights.
    """

    version: int
    contents: str


class RequestTimings(NamedTuple):
    """Seconds that a request spent on its replica before its first token, by what it spent them on.

    queue_s    from its arrival to its place in a batch, without `fetch_s`
    fetch_s    waiting for KV from the prefix store
    prefill_s  from its place in a batch to its first token
    """

    queue_s: float
    fetch_s: float
    prefill_s: float


class StreamMessage(NamedTuple):
    """One message of a replica's stream: every delta that is ready, and the replica's load for the router.

    The first message of a stream has `cached_tokens` (prompt tokens that were not computed again) and,
    if asked for, `prompt_logprobs`. The only message of a pooled request has `embedding`: fp32 values, one
    per hidden dimension, not normalised to unit length. Where there is a prefix store, the first message has `stored`,
    and the last has it again if more is known by then. The first message has `weights`, the version of the model's
    weights that the whole response is computed with, and `contents`, their digest as in ReplicaLoad. A router sends
    both again where the response continues on another replica with other weights. The first message has `timings` if a
    token has been sampled, and the last one `preemptions`, the times that the request's sequences lost their places.
    """

    deltas: tuple[Delta, ...] = ()
    load: ReplicaLoad | None = None
    cached_tokens: int | None = None
    prompt_logprobs: tuple[PromptLogprob, ...] | None = None
    embedding: tuple[float, ...] | None = None
    stored: PromptStoreStatus | None = None
    weights: int | None = None
    contents: str = ""
    timings: RequestTimings | None = None
    preemptions: int = 0

    @property
    def weights_status(self) -> WeightsStatus | None:
        return None if self.weights is None else WeightsStatus(self.weights, self.contents)


@dataclass(frozen=True, slots=True)
class KvEvent:
    """Change of the prefix index: a block can be found by its hash (`token_ids` are its tokens), or no longer can (no
    tokens).
    """

    hash: bytes
    token_ids: tuple[int, ...] = ()
    parent: bytes | None = None  # hash of the block before it; None: it is the first


@dataclass(frozen=True, slots=True)
class KvEvents:
    """Changes of one tenant's blocks since the last message, and the replica's load.

    `lost`: more changes happened than could be kept, and `events` has only those after the gap.
    """

    events: tuple[KvEvent, ...]
    load: ReplicaLoad
    lost: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of the model that the ingress needs to validate and translate requests."""

    name: str
    family: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    quantization: str
    architecture: str = ""  # name in checkpoints, such as Qwen2ForCausalLM; empty for an engine without a model


@dataclass(frozen=True, slots=True)
class ReplicaProfile:
    """Description of a replica, published once when it is ready. Rates are measured during warm-up.

    decode_s   seconds of a decode step at each batch size in PROFILED_BATCH_SIZES, with short contexts; empty: not
               measured
    context_s  extra seconds of a step for each token of context of its sequences
    pool       name of the replica's pool, set by the reader of the profile
    shares     replicas with the same value read each other's prefixes from a store; empty: there is no store
    fetch_s    estimated seconds to fetch one token's KV from the store
    """

    replica_id: str
    model: ModelInfo
    device: str  # "cpu" or e.g. "cuda:0"
    device_name: str
    compute_capability: str | None  # "6.1"; None for a CPU
    numerics: str  # numerics class; replicas of one class give the same tokens
    fingerprint: str  # replicas with the same may share KV: digest of weights, config, rope, KV dtype and numerics
    prefill_tokens_per_s: float
    decode_step_s: float  # one step at batch 1
    kv_blocks_total: int
    max_batch_tokens: int
    choices: dict[str, str] = field(default_factory=dict)  # automatic choice -> reason
    decode_s: tuple[float, ...] = ()
    context_s: float = 0.0
    max_running: int = 0
    pool: str = ""
    shares: str = ""
    fetch_s: float = 0.0

    @property
    def kv_tokens(self) -> int:
        return self.kv_blocks_total * BLOCK_TOKENS
