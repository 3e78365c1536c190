"""Protocol vllm.grpc.engine.VllmEngine, built on a `RequestAdmitter` and a router."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ....replicas.errors import InvalidRequest, MotleyError, Overloaded
from ....replicas.host.distribution import motley_version
from ....replicas.types import BLOCK_TOKENS, FinishReason, ReplicaLoad, StreamMessage
from ...one_shot_event import take_until
from ...protos import vllm_common_pb2 as common
from ...protos import vllm_engine_pb2 as pb
from ...request_errors import unsupported_field
from ...routing.router import Router
from ...routing.streaming.first_output import is_cut_off
from ...transport.caller import Caller
from ..common.admission import RequestAdmitter
from ..common.collected_response import CollectedChoice, CollectedResponse, LogprobBudget, encode_response
from ..common.embedding import embed, unit_length
from ..common.fields.unknown_message_fields import refuse_unknown_fields
from ..common.fields.wire_names import in_wire_names
from ..common.parsed_request import AdmittedRequest
from . import vllm_response as reply
from .abort_registry import AbortRegistry
from .vllm_kv_events import KvEventBatcher
from .vllm_request import (
    check_rank,
    constraint_bytes,
    parse_embed_request,
    parse_generate_request,
    shortest_decimal,
)

HOLDING = "no replica is there; requests are held for the first that comes"
MAX_SUBSCRIBERS = 8  # subscribers to KV events of one tenant, or without API keys of all
SERVER_TYPE = "vllm-grpc"  # how clients tell this protocol from similar ones


class VllmProtocol:
    """Calls of VllmEngine, which raise MotleyError. `defaults`: the checkpoint's sampling defaults."""

    def __init__(self, admitter: RequestAdmitter, router: Router, defaults: Mapping[str, Any]) -> None:
        self._admitter = admitter
        self._router = router
        self._defaults = defaults
        self._aborts = AbortRegistry()
        self._subscribers: Counter[str] = Counter()
        self._began = time.monotonic()
        self._received = 0.0

    async def generate(self, request: pb.GenerateRequest, caller: Caller) -> AsyncGenerator[pb.GenerateResponse, None]:
        self._received = time.time()
        size = constraint_bytes(request.sampling_params)
        with self._aborts.running(caller.tenant, request.request_id) as aborted:  # from here on, even if unread
            parsed = await self._admitter.read(parse_generate_request, request, grammar_bytes=size)
            with in_wire_names(parsed.wire_names):
                admitted = await self._admitter.admit(parsed, caller)
            async with (
                aclosing(self._router.stream(admitted.request, whole=not request.stream)) as messages,
                aclosing(take_until(aborted, messages)) as taken,
                aclosing(_responses(admitted, taken, chunks=request.stream)) as responses,
            ):
                async for response in responses:
                    yield response

    def abort(self, request: pb.AbortRequest, caller: Caller) -> list[str]:
        """Abort the requests that run on this ingress; return their ids, so that other ingresses can abort them too."""
        refuse_unknown_fields(request)
        if "" in request.request_ids:
            raise InvalidRequest("request_ids: one is empty", param="request_ids", code="invalid_value")
        client_ids = list(request.request_ids)
        self.abort_locally(caller.tenant, client_ids)
        return client_ids

    def abort_locally(self, tenant: str, client_ids: Iterable[str]) -> None:
        for client_id in client_ids:
            self._aborts.abort(tenant, client_id)

    async def embed(self, request: pb.EmbedRequest, caller: Caller) -> pb.EmbedResponse:
        self._received = time.time()
        admitted = await self._admitter.admit(parse_embed_request(request), caller)
        values = unit_length(await embed(self._router, admitted))
        tokens = len(admitted.request.prompt_ids)
        return pb.EmbedResponse(embedding=values, prompt_tokens=tokens, embedding_dim=len(values))

    async def flush(self, request: common.FlushCacheRequest, caller: Caller) -> common.FlushCacheResponse:
        """Drop the cached prefixes of the caller's tenant; without API keys, of all. The engine need not be idle for
        it.
        """
        refuse_unknown_fields(request)
        if not request.timeout_s >= 0:
            raise InvalidRequest(
                f"timeout_s: {request.timeout_s} is not accepted; expected seconds",
                param="timeout_s",
                code="invalid_value",
            )
        try:
            async with asyncio.timeout(request.timeout_s or None):
                await self._router.flush(caller.tenant or None)
        except TimeoutError:
            message = f"not every replica has dropped them within {shortest_decimal(request.timeout_s):g} s"
            return common.FlushCacheResponse(success=False, message=message)
        except MotleyError as error:
            return common.FlushCacheResponse(success=False, message=error.message)
        return common.FlushCacheResponse(success=True)

    async def kv_events(
        self, request: common.SubscribeKvEventsRequest, caller: Caller
    ) -> AsyncGenerator[common.KvEventBatch, None]:
        """Yield KV events of the caller's own tenant's blocks, since events show the tokens of prompts."""
        refuse_unknown_fields(request)
        if self._subscribers[caller.tenant] >= MAX_SUBSCRIBERS:
            raise Overloaded(f"at most {MAX_SUBSCRIBERS} subscribers at a time", code="too_many_watches")
        batches = KvEventBatcher(request)
        self._subscribers[caller.tenant] += 1
        try:
            async with aclosing(self._router.kv_events(caller.tenant)) as messages:
                async for rank, message in messages:
                    batch = batches.batch(message, rank)
                    if batch is not None:
                        yield batch
        finally:
            self._subscribers[caller.tenant] -= 1

    async def health(self) -> pb.HealthCheckResponse:
        try:
            await self._router.load()
        except MotleyError as error:
            return pb.HealthCheckResponse(healthy=False, message=error.message)
        return pb.HealthCheckResponse(healthy=True, message=HOLDING if self._router.holding else "")

    def model_info(self) -> pb.GetModelInfoResponse:
        info, tokenizer = self._admitter.info, self._admitter.tokenizer
        special = {name: tokenizer.token_id(text) or 0 for name, text in tokenizer.named_tokens.items()}
        return pb.GetModelInfoResponse(
            model_path=info.name,
            tokenizer_path=info.name,
            served_model_name=info.name,
            is_generation=True,
            max_context_length=info.max_model_len,
            max_req_input_len=info.max_model_len - 1,
            vocab_size=info.vocab_size,
            model_type=info.family,
            architectures=[info.architecture] if info.architecture else (),
            eos_token_ids=info.eos_token_ids,
            pad_token_id=special.get("pad_token", 0),
            bos_token_id=special.get("bos_token", 0),
            default_sampling_params_json=json.dumps(dict(self._defaults)),
        )

    def server_info(self) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            active_requests=self._router.num_streams,
            is_paused=self._router.draining,
            last_receive_timestamp=self._received,
            uptime_seconds=time.monotonic() - self._began,
            server_type=SERVER_TYPE,
            data_parallel_size=len(self._router.live.replicas),
            block_size=BLOCK_TOKENS,
            model_dtype=self._admitter.info.dtype,
        )

    async def loads(self, request: pb.GetLoadsRequest) -> pb.GetLoadsResponse:
        refuse_unknown_fields(request)
        for name in request.include:
            if name not in ("core", "all"):
                raise unsupported_field(f"include: {name[:40]!r}", "expected 'core'")
        loads = await self._router.loads()
        if request.HasField("dp_rank"):
            check_rank("dp_rank", request.dp_rank, len(loads))
        ranks = [request.dp_rank] if request.HasField("dp_rank") else range(len(loads))
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=motley_version(),
            dp_rank_count=len(loads),
            loads=[scheduler_load(rank, loads[rank]) for rank in ranks],
        )


async def _responses(
    admitted: AdmittedRequest, messages: AsyncGenerator[StreamMessage, None], *, chunks: bool
) -> AsyncGenerator[pb.GenerateResponse, None]:
    """Yield the responses. In a stream the chunks have the log-probabilities; the last response repeats the tokens
    alone.
    """
    request = admitted.request
    choices = [CollectedChoice(index) for index in range(request.sampling.n)]
    gathered = CollectedResponse(
        choices, LogprobBudget(admitted.parsed.wire_names), logprobs=not chunks, prompt_shown=admitted.prompt_shown
    )
    begun: set[int] = set()

    def complete(choice: CollectedChoice, reason: FinishReason | str) -> pb.GenerateResponse:
        return reply.complete_response(request, gathered, choice, reason, prompt=choice.index not in begun)

    async for message in messages:
        gathered.add(message)
        for delta in message.deltas:
            if chunks and delta.token_ids:
                first = delta.index not in begun
                begun.add(delta.index)
                chunk = partial(reply.stream_chunk, request, gathered, delta, first=first)
                yield await encode_response(gathered.budget, chunk) if first else chunk()
            if delta.finish_reason is not None and not is_cut_off(delta):
                choice = gathered.choices[delta.index]
                yield await encode_response(gathered.budget, partial(complete, choice, delta.finish_reason))
    for choice in gathered.choices:  # messages of an aborted choice end before its last
        if choice.finish_reason is None:
            yield complete(choice, reply.ABORTED)


def scheduler_load(rank: int, load: ReplicaLoad) -> pb.SchedulerLoad:
    used = load.kv_blocks_total - load.kv_blocks_free
    return pb.SchedulerLoad(
        dp_rank=rank,
        num_running_reqs=load.running,
        num_waiting_reqs=load.waiting,
        num_total_reqs=load.running + load.waiting,
        num_used_tokens=used * BLOCK_TOKENS,
        max_total_num_tokens=load.kv_blocks_total * BLOCK_TOKENS,
        token_usage=used / load.kv_blocks_total if load.kv_blocks_total else 0.0,
        utilization=used / load.kv_blocks_total if load.kv_blocks_total else 0.0,
        num_waiting_uncached_tokens=load.queued_prefill_tokens,
        gen_throughput=load.generated_tokens_per_s,
        cache_hit_rate=load.cached_tokens / load.prompt_tokens if load.prompt_tokens else 0.0,
        max_running_requests=load.max_running,
    )
