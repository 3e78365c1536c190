"""The border types: what crosses between the door, the replica and the engine.

Everything here is plain, frozen data that pickles and compares by value: what there is one of for each token is a
named tuple, which is made in a fifth of the time. A `Request` is validated by
construction: whoever holds one need not check it again.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from ..kernels.device.precision import GEMM_ROWS
from .sampling_params import SamplingParams

__all__ = [
    "BATCHES",
    "BLOCK_TOKENS",
    "NULL",
    "RATE_WINDOW_S",
    "Delta",
    "FinishReason",
    "KvEvent",
    "KvEvents",
    "ModelInfo",
    "Pooling",
    "PromptLogprob",
    "ReplicaLoad",
    "ReplicaProfile",
    "Request",
    "SamplingParams",
    "Stored",
    "StreamMessage",
    "TokenLogprob",
    "WeightsTold",
    "joined",
    "sum_of",
]

NULL = "null"  # device, numerics, family and so on of an engine that computes nothing
RATE_WINDOW_S = 10.0  # what a replica makes is told as an average over so long
# For which a profile tells the time of a decode step: on both sides of where kernels for few rows end, too.
BATCHES = (1, 2, 4, 8, 16, 32, GEMM_ROWS, GEMM_ROWS + 1, 128, 256)
BLOCK_TOKENS = 16  # tokens per KV block: part of the protocol, since block hashes are shared


class FinishReason(enum.StrEnum):
    """Why a choice ended. Every admitted choice gets exactly one."""

    STOP = "stop"  # end-of-sequence id, stop id or stop string
    LENGTH = "length"  # max_tokens or the context is full
    CANCELLED = "cancelled"  # the consumer went away
    DEADLINE = "deadline"  # the request's deadline passed
    REPLICA_LOST = "replica_lost"  # the stream could not be continued here; the error says why
    ERROR = "error"  # the engine failed; the stream raises EngineFault


class Pooling(enum.StrEnum):
    """How a prompt's hidden states become one vector; nothing is generated then."""

    LAST = "last"  # of the last token
    MEAN = "mean"  # of all tokens


class TokenLogprob(NamedTuple):
    """Log-probability (natural log) of one token, with the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# Log-probabilities of a prompt: the first token has none.
PromptLogprob = TokenLogprob | None


@dataclass(frozen=True, slots=True)
class Request:
    """One validated request.

    prompt_ids    token ids of the prompt, at least one
    output_ids    per choice, the output so far (resume); empty, or one tuple for each of `sampling.n`
    sampling      seed is always set here (fixed at the door), so a resumed request repeats exactly
    deadline_s    seconds left, from the moment of sending; None waits for ever. A duration, not a
                  time of day: clocks of two machines differ
    priority      higher runs first
    tenant        who asks; separates prefix caches and queues
    cache_salt    derived from the tenant by the door, never given by a client
    pooling       set: the answer is one embedding of the prompt, and no token
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

    def __post_init__(self) -> None:
        assert self.prompt_ids, "a request has at least one prompt token"
        assert len(self.output_ids) in (0, self.sampling.n), "output_ids: none, or one per choice"
        assert self.pooling is None or (self.sampling.n == 1 and not self.output_ids), "a pooled request has no output"


class Delta(NamedTuple):
    """What became ready for one choice since its last delta.

    `text` may lag behind `token_ids` (incomplete UTF-8, a possible stop string) and never exceeds them.
    `finish_reason` is set on the last delta of the choice, and only there.
    `stop_reason`: the stop string or stop id that ended it, if one did.
    """

    index: int  # type: ignore[assignment]  # of the choice, in place of tuple's own
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


def joined(deltas: list[Delta]) -> Delta:
    """Of one choice, one after the other, as one."""
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
    """What a replica carries right now. Token counts, not request counts: prompts differ a thousandfold."""

    running: int = 0  # sequences in the running batch
    waiting: int = 0  # sequences admitted and not yet running
    queued_prefill_tokens: int = 0  # tokens still to be computed before their first output
    kv_blocks_free: int = 0  # free or evictable
    kv_blocks_total: int = 0
    steps: int = 0  # that the engine has taken since its start
    max_running: int = 0  # sequences that may be in the running batch
    prompt_tokens: int = 0  # of all requests that have begun since the replica did
    queried_tokens: int = 0  # of those, looked for in the prefix cache
    cached_tokens: int = 0  # and found there
    generated_tokens_per_s: float = 0.0  # over the last RATE_WINDOW_S
    drafted_tokens: int = 0  # tried by speculation since the start
    accepted_tokens: int = 0  # and those of them that were right
    preemptions_swapped: int = 0  # sequences that lost their place to others, and whose KV went to the host
    preemptions_recomputed: int = 0  # likewise, and whose KV was computed again
    external_queried_tokens: int = 0  # asked of the prefix store since the start
    external_hit_tokens: int = 0  # and those of them that came from it
    draining: bool = False  # takes nothing new; what it has goes on
    weights_version: int = 0  # of the model's weights, which requests begin with: updates since the start
    weights_contents: str = ""  # a digest of them, in hex: the same wherever they are; empty: there are none


_NOT_SUMMED = ("draining", "weights_version", "weights_contents")


def sum_of(loads: Iterable[ReplicaLoad]) -> ReplicaLoad:
    """What several replicas carry together; they drain if all of them do, and the oldest weights are told."""
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
class Stored:
    """What a replica knows of one prompt in the prefix store that it shares with others.

    tokens   leading ones that the store had when this replica last read or wrote them
    absent   from that one on it had none when this request asked for them; None: it has not found the end
    token_s  seconds that it takes to fetch a token here, lately
    """

    tokens: int
    absent: int | None = None
    token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WeightsTold:
    """A replica's weights. version: updates since the checkpoint; contents: a digest of all of them, in hex."""

    version: int
    contents: str


class StreamMessage(NamedTuple):
    """One message of a replica's stream: every delta that is ready, and the load for the router.

    The first message of a stream has `cached_tokens` (prompt tokens that were not computed again) and,
    if asked for, `prompt_logprobs`. The only message of a pooled request has `embedding`: fp32 values, one
    per hidden dimension, not normalised to unit length. Where there is a prefix store, the first has `stored`, and the
    last has it again if more is known by then. The first has `weights`: the version of the model's weights that the
    whole answer is computed with, and `contents`, which is their digest as ReplicaLoad has it. From a router both come
    again where the answer goes on with others, on another replica.
    """

    deltas: tuple[Delta, ...] = ()
    load: ReplicaLoad | None = None
    cached_tokens: int | None = None
    prompt_logprobs: tuple[PromptLogprob, ...] | None = None
    embedding: tuple[float, ...] | None = None
    stored: Stored | None = None
    weights: int | None = None
    contents: str = ""

    @property
    def told(self) -> WeightsTold | None:
        return None if self.weights is None else WeightsTold(self.weights, self.contents)


@dataclass(frozen=True, slots=True)
class KvEvent:
    """A block came to be found by its hash (`token_ids` are its tokens), or no longer is (there are none)."""

    hash: bytes
    token_ids: tuple[int, ...] = ()
    parent: bytes | None = None  # hash of the block before it; None: it is the first


@dataclass(frozen=True, slots=True)
class KvEvents:
    """What became of one tenant's blocks since the last message, and the replica's load.

    `lost`: more happened than could be kept, and `events` is only what came after that.
    """

    events: tuple[KvEvent, ...]
    load: ReplicaLoad
    lost: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the door must know of the model to validate and translate."""

    name: str
    family: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    quantization: str
    architecture: str = ""  # as checkpoints call it, such as Qwen2ForCausalLM; none of an engine that has no model


@dataclass(frozen=True, slots=True)
class ReplicaProfile:
    """What a replica is; published once at readiness. Rates are measured during warm-up.

    decode_s   seconds of a decode step at each of BATCHES, with short contexts; none: nobody has measured
    context_s  seconds more, for each token of context of a step's sequences
    pool       whose it is, as the one who reads it knows
    shares     replicas with the same read each other's prefixes from a store; empty: it has none
    fetch_s    seconds to fetch a token from there, at a guess
    """

    replica_id: str
    model: ModelInfo
    device: str  # "cpu" or e.g. "cuda:0"
    device_name: str
    compute_capability: str | None  # "6.1"; None for a CPU
    numerics: str  # replicas of one numerics class give the same tokens
    fingerprint: str  # what may share KV: weights, config, rope, kv dtype, numerics
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
