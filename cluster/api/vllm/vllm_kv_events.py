"""KV events and load in the batches of vllm.grpc.engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ....replicas.types import BLOCK_TOKENS, KvEvent, KvEvents, ReplicaLoad
from ...protos import vllm_common_pb2 as pb

_DEVICE = pb.KvCacheTier.KV_CACHE_TIER_DEVICE


class KvEventBatcher:
    """Batches of KV events for one subscriber.

    A subscriber that resumes, or reads so slowly that events were lost, is told to forget all blocks: no events are
    kept to be sent again. A gap in the sequence numbers means the same.
    """

    def __init__(self, request: pb.SubscribeKvEventsRequest) -> None:
        self._number = request.start_sequence_number
        self._forget = request.start_sequence_number > 0
        self._begun = request.load_records_before_first_batch
        self._event_id = 0
        self._sample = 0

    def batch(self, message: KvEvents, rank: int | None) -> pb.KvEventBatch | None:
        """Return the next batch; None if it has nothing that the subscriber wants."""
        events = list(self._events(message))
        if not events and not self._begun:
            return None
        self._begun = True
        if events:
            self._number = (self._number + (2 if message.lost else 1)) % 2**64  # wraps as the wire's 64-bit number does
        batch = pb.KvEventBatch(sequence_number=self._number, timestamp=time.time(), events=events)
        batch.load.CopyFrom(self._load(message.load))
        batch.load.load_only = not events
        if rank is not None:
            batch.dp_rank = rank
        return batch

    def _events(self, message: KvEvents) -> Iterable[pb.KvCacheEvent]:
        if message.lost or self._forget:
            self._forget = False
            yield self._event(cleared=pb.KvCacheCleared())
        for run in _runs(message.events):
            if run[0].token_ids:
                yield self._event(stored=_stored(run))
            else:
                hashes = [_number(event.hash) for event in run]
                yield self._event(removed=pb.KvBlocksRemoved(block_hashes=hashes, tier=_DEVICE))

    def _event(
        self,
        *,
        stored: pb.KvBlocksStored | None = None,
        removed: pb.KvBlocksRemoved | None = None,
        cleared: pb.KvCacheCleared | None = None,
    ) -> pb.KvCacheEvent:
        self._event_id += 1
        return pb.KvCacheEvent(event_id=self._event_id, stored=stored, removed=removed, cleared=cleared)

    def _load(self, load: ReplicaLoad) -> pb.EngineLoad:
        self._sample += 1
        used = load.kv_blocks_total - load.kv_blocks_free
        return pb.EngineLoad(
            running_requests=load.running,
            waiting_requests=load.waiting,
            waiting_uncached_tokens=load.queued_prefill_tokens,
            token_usage=used / load.kv_blocks_total if load.kv_blocks_total else 0.0,
            gen_throughput=load.generated_tokens_per_s,
            max_running_requests=load.max_running,
            sample=self._sample,
        )


def _runs(events: Sequence[KvEvent]) -> Iterable[list[KvEvent]]:
    """Group neighbouring events that one message can hold: stored blocks that follow each other, or removals."""
    run: list[KvEvent] = []
    for event in events:
        follows = run and (
            event.parent == run[-1].hash and run[-1].token_ids if event.token_ids else not run[-1].token_ids
        )
        if run and not follows:
            yield run
            run = []
        run.append(event)
    if run:
        yield run


def _stored(run: Sequence[KvEvent]) -> pb.KvBlocksStored:
    stored = pb.KvBlocksStored(tier=_DEVICE)
    if run[0].parent is not None:
        stored.parent_block_hash = _number(run[0].parent)
    for event in run:
        stored.blocks.add(block_hash=_number(event.hash), token_ids=event.token_ids, block_size=BLOCK_TOKENS)
    return stored


def _number(key: bytes) -> int:
    return int.from_bytes(key[:8], "big", signed=True)
