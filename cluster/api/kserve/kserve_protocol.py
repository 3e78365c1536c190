"""KServe's inference protocol, built on a `RequestAdmitter` and a router, for gRPC and HTTP alike."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ....replicas.errors import InvalidRequest, MotleyError
from ....replicas.types import StreamMessage, WeightsStatus
from ...one_shot_event import OneShotEvent
from ...request_errors import unsupported_field
from ...routing.router import Router
from ...routing.streaming.first_output import is_cut_off
from ...transport import access_log
from ...transport.caller import MAX_CLIENT_ID, Caller
from ...transport.retry_after import retry_after_s
from ..common.admission import RequestAdmitter
from ..common.collected_response import (
    LogprobBudget,
    collect_response,
    count_logprob_values,
    encode_response,
    encode_values,
)
from ..common.fields.unknown_fields import UnknownFieldPolicy
from ..common.fields.wire_names import in_wire_names
from ..common.parsed_request import AdmittedRequest
from .kserve_request import EMPTY_FINAL, VERSION, InferRequest, check_version, grammar_bytes, parse_infer_request
from .kserve_response import InferResponse, output_tensors, requested_outputs, usage, weights_parameter
from .kserve_statistics import InferStatistics

FINAL = "triton_final_response"
_NOT_FINAL = {FINAL: False}  # parameters of every response of a stream but the last


@dataclass(frozen=True, slots=True)
class ModelIndexEntry:
    """A model in the repository index. state: "READY" or "UNAVAILABLE". reason: why it is unavailable."""

    name: str
    version: str
    state: str
    reason: str


class KServeProtocol:
    """KServe's calls. They raise MotleyError; only `infer_stream` returns errors as responses."""

    def __init__(self, admitter: RequestAdmitter, router: Router, unknown: UnknownFieldPolicy | None = None) -> None:
        self.admitter = admitter
        self.unknown = unknown or UnknownFieldPolicy()
        self._router = router
        self.statistics = InferStatistics()

    async def infer(self, request: InferRequest, caller: Caller) -> InferResponse:
        with self.statistics.counted():
            return await self._infer(request, caller)

    async def _infer(self, request: InferRequest, caller: Caller) -> InferResponse:
        infer = await self.admitter.read(
            parse_infer_request, request, self.unknown, grammar_bytes=grammar_bytes(request)
        )
        if infer.streaming:
            raise InvalidRequest(
                "streaming: this call has one response; use ModelStreamInfer", param="streaming", code="invalid_value"
            )
        if infer.empty_final:
            raise unsupported_field(f"parameters.{EMPTY_FINAL}", "this call has one response; use ModelStreamInfer")
        with in_wire_names(infer.names):
            admitted = await self.admitter.admit(infer.parsed, caller)
        return await self._whole(admitted, requested_outputs(request.outputs, admitted.request.sampling))

    async def infer_stream(self, request: InferRequest, caller: Caller) -> AsyncGenerator[InferResponse, None]:
        """Yield the responses to one request of a stream, the last of them marked. Never raises MotleyError."""
        empty = request.parameters.get(EMPTY_FINAL) is True
        try:
            async with aclosing(self.parts(request, caller)) as parts:
                async for part in parts:
                    for response in _ending(part, empty=empty) if part.last else (part,):
                        yield response
        except MotleyError as error:
            yield failed_response(request.id, error)

    async def parts(self, request: InferRequest, caller: Caller) -> AsyncGenerator[InferResponse, None]:
        """Yield the parts of one answer, of which the last is not yet marked; one part, unless the request asks for a
        stream.
        """
        with self.statistics.counted():
            infer = await self.admitter.read(
                parse_infer_request, request, self.unknown, grammar_bytes=grammar_bytes(request)
            )
            with in_wire_names(infer.names):
                admitted = await self.admitter.admit(infer.parsed, caller)
            output_names = requested_outputs(request.outputs, admitted.request.sampling)
            if not infer.streaming:
                yield await self._whole(admitted, output_names)
                return
            async with (
                aclosing(self._router.stream(admitted.request)) as messages,
                aclosing(_parts(admitted, output_names, messages)) as parts,
            ):
                async for part in parts:
                    yield part

    @property
    def stopping(self) -> OneShotEvent:
        """Event that is set when the drain of the service begins."""
        return self._router.stopping

    async def check_ready(self) -> None:
        """Raise Unavailable unless a replica answers, or requests are held for one."""
        await self._router.load()

    async def unready_reason(self) -> str:
        """Return why the service is not ready; empty if it is ready."""
        try:
            await self.check_ready()
        except MotleyError as error:
            return error.message
        return ""

    async def index(self, *, ready: bool) -> list[ModelIndexEntry]:
        """Return the models, or with `ready` only those that are ready."""
        reason = await self.unready_reason()
        if ready and reason:
            return []
        return [ModelIndexEntry(self.admitter.info.name, VERSION, "UNAVAILABLE" if reason else "READY", reason)]

    def serves(self, name: str, version: str) -> bool:
        try:
            self.check_model(name, version)
        except MotleyError:
            return False
        return True

    def check_model(self, name: str, version: str) -> None:
        """Raise NotFound unless this model and version are served here."""
        with in_wire_names({"model": "name", "model_version": "version"}):
            self.admitter.check_model(name)
            check_version(version)

    async def _whole(self, admitted: AdmittedRequest, output_names: tuple[str, ...]) -> InferResponse:
        sampling, budget = admitted.request.sampling, LogprobBudget(admitted.parsed.wire_names)
        async with aclosing(self._router.stream(admitted.request, whole=True)) as messages:
            gathered = await collect_response(messages, sampling.n, budget)
        return InferResponse(
            admitted.parsed.client_id,
            admitted.model,
            await encode_response(
                budget, lambda: output_tensors(output_names, gathered.choices, sampling, gathered.prompt_logprobs)
            ),
            usage(admitted.request, gathered.completion_tokens, gathered.cached_tokens)
            | weights_parameter(gathered.weights),
            last=True,
        )


def failed_response(request_id: str, error: MotleyError) -> InferResponse:
    """Return an error as a response of a stream. Clients may see the message alone, so it has the request's id;
    parameters have the code.
    """
    access_log.current_record().refused(error)
    prefix = f"[request id: {request_id[:MAX_CLIENT_ID]}] " if request_id else ""
    details = {"code": error.code, "retry_after": retry_after_s(error)}
    parameters = {FINAL: True} | {name: value for name, value in details.items() if value is not None}
    return InferResponse(request_id, parameters=parameters, error=f"{prefix}{error.message}", last=True)


async def _parts(
    admitted: AdmittedRequest, output_names: tuple[str, ...], messages: AsyncIterable[StreamMessage]
) -> AsyncGenerator[InferResponse, None]:
    """Yield a response for each message that has something new; the last has the usage and all versions of weights."""
    request = admitted.request
    num_tokens = cached_tokens = num_ended = num_reported = 0
    weights: list[WeightsStatus] = []
    prompt = None
    async for message in messages:
        if (reported := message.weights_status) is not None:
            weights.append(reported)
        cached_tokens = cached_tokens if message.cached_tokens is None else message.cached_tokens
        prompt = prompt or message.prompt_logprobs
        if not message.deltas or any(map(is_cut_off, message.deltas)):
            continue  # a choice that is cut off ends with an error response instead
        num_tokens += sum(len(delta.token_ids) for delta in message.deltas)
        num_ended += sum(delta.finish_reason is not None for delta in message.deltas)
        last = num_ended == request.sampling.n
        tensors = await encode_values(
            count_logprob_values(prompt or ()),
            partial(output_tensors, output_names, message.deltas, request.sampling, prompt),
        )
        totals: dict[str, Any] = usage(request, num_tokens, cached_tokens) if last else _NOT_FINAL
        if last or num_reported < len(weights):
            totals = totals | weights_parameter(weights if last else weights[-1:])
            num_reported = len(weights)
        yield InferResponse(admitted.parsed.client_id, admitted.model, tensors, totals, last=last)
        prompt = None


def _ending(response: InferResponse, *, empty: bool) -> tuple[InferResponse, ...]:
    """Return the last response, marked as Triton marks it; if `empty`, a further response without outputs is the
    last.
    """
    if not empty:
        return (replace(response, parameters={**response.parameters, FINAL: True}),)
    return (
        replace(response, parameters=_NOT_FINAL),
        replace(response, outputs=(), parameters={**response.parameters, FINAL: True}),
    )
