"""The words of motley.v1: protobuf <-> Ask, StreamMessage."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator
from typing import Any, cast

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from ...replicas.errors import InvalidRequest
from ...replicas.grammar_spec import GrammarSpec
from ...replicas.protocol import Delta, FinishReason, ModelInfo, PromptLogprob, StreamMessage, TokenLogprob
from ...replicas.tokenizer import Tokenizer
from ..ask import Admitted, Ask
from ..errors import unknown_field
from ..gather import Gathered, GatheredChoice, check_finish
from ..protos import inference_pb2 as pb
from .constraints import constraint

_NOT_SCALAR = ("logit_bias", "stop", "stop_token_ids", "grammar")
_FINISH = {reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}


def complete_ask(request: pb.CompleteRequest) -> Ask:
    refuse_unknown(request)
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt: give text or token_ids", param="prompt", code="missing_field")
    return _ask(request, request.text if kind == "text" else tuple(request.token_ids.ids))


def chat_ask(request: pb.ChatRequest) -> Ask:
    refuse_unknown(request)
    given = request.template_arguments.items()
    arguments = {name: getattr(value, value.WhichOneof("value") or "text") for name, value in given}
    names = {"chat_template_kwargs": "template_arguments"}
    return _ask(request, messages(request.messages), chat=True, template_arguments=arguments, wire_names=names)


def messages(given: Iterable[pb.ChatMessage]) -> list[dict[str, str]]:
    return [
        {"role": message.role, "content": message.content} | ({"name": message.name} if message.name else {})
        for message in given
    ]


def _ask(request: Any, prompt: Any, **more: Any) -> Ask:
    return Ask(
        model=request.model,
        prompt=prompt,
        sampling=sampling(request.sampling),
        output_ids=[tuple(ids.ids) for ids in request.output_ids],
        client_id=request.request_id,
        timeout_s=request.timeout_s if request.HasField("timeout_s") else None,
        priority=request.priority,
        **more,
    )


def sampling(params: pb.SamplingParams) -> dict[str, Any]:
    """Only the fields that the client set, by SamplingParams' names, which are the wire's as well."""
    scalars = [field.name for field, _ in params.ListFields() if field.name not in _NOT_SCALAR]
    given: dict[str, Any] = {name: getattr(params, name) for name in scalars}
    if params.logit_bias:
        given["logit_bias"] = dict(params.logit_bias)
    if params.stop:
        given["stop"] = tuple(params.stop)
    if params.stop_token_ids:
        given["stop_token_ids"] = tuple(params.stop_token_ids)
    if params.HasField("grammar"):
        given["grammar"] = _grammar(params.grammar)
    return given


def _grammar(grammar: pb.Grammar) -> GrammarSpec | None:
    kind = grammar.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("sampling.grammar: it is empty", param="sampling.grammar", code="missing_field")
    value = list(grammar.choice.texts) if kind == "choice" else getattr(grammar, kind)
    return constraint("grammar" if kind == "ebnf" else kind, value, f"sampling.grammar.{kind}")


def refuse_unknown(message: Message, path: str = "") -> None:
    """Raise InvalidRequest for a field this service does not know, at any depth."""
    for unknown in cast(Iterable[Any], UnknownFieldSet(message)):
        raise unknown_field(f"{path}field {unknown.field_number}")
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in [value] if isinstance(value, Message) else value:
            refuse_unknown(part, f"{path}{field.name}.")


class Replies:
    """Builds the answers of one served model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def completion(self, admitted: Admitted, gathered: Gathered) -> pb.Completion:
        return pb.Completion(
            started=self.started(admitted),
            choices=[self._choice(choice) for choice in gathered.choices],
            prompt_logprobs=self._prompt_logprobs(gathered.prompt_logprobs),
            usage=usage(admitted, gathered.completion_tokens, gathered.cached_tokens),
        )

    async def chunks(
        self, admitted: Admitted, stream: AsyncIterable[StreamMessage]
    ) -> AsyncGenerator[pb.CompletionChunk, None]:
        """One chunk for each message; the first has `started`, an extra last one has `usage`."""
        yield pb.CompletionChunk(started=self.started(admitted))
        num_tokens = cached_tokens = 0
        async for message in stream:
            num_tokens += sum(len(delta.token_ids) for delta in message.deltas)
            cached_tokens = cached_tokens if message.cached_tokens is None else message.cached_tokens
            if message.deltas or message.prompt_logprobs:
                yield self._chunk(message)
            for delta in message.deltas:
                if delta.finish_reason is not None:
                    check_finish(delta.finish_reason)
        yield pb.CompletionChunk(usage=usage(admitted, num_tokens, cached_tokens))

    def started(self, admitted: Admitted) -> pb.Started:
        request = admitted.request
        return pb.Started(
            request_id=request.request_id,
            client_request_id=admitted.ask.client_id,
            model=admitted.model,
            seed=request.sampling.seed or 0,
            prompt_tokens=len(request.prompt_ids),
        )

    def _chunk(self, message: StreamMessage) -> pb.CompletionChunk:
        return pb.CompletionChunk(
            choices=[self._choice(delta) for delta in message.deltas],
            prompt_logprobs=self._prompt_logprobs(message.prompt_logprobs),
        )

    def _choice(self, choice: Delta | GatheredChoice) -> pb.Choice:
        reply = pb.Choice(index=choice.index, text=choice.text, token_ids=choice.token_ids)
        reply.logprobs.extend(self._logprob(entry) for entry in choice.logprobs or ())
        if choice.finish_reason is not None:
            reply.finish_reason = _FINISH[choice.finish_reason]
        if isinstance(choice.stop_reason, str):
            reply.stop_string = choice.stop_reason
        elif choice.stop_reason is not None:
            reply.stop_token_id = choice.stop_reason
        return reply

    def _logprob(self, entry: TokenLogprob) -> pb.TokenLogprob:
        return pb.TokenLogprob(
            token_id=entry.token_id,
            logprob=entry.logprob,
            top=[pb.Alternative(token_id=i, logprob=p, **self._token(i)) for i, p in entry.top],
            **self._token(entry.token_id),
        )

    def _token(self, token_id: int) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "token_bytes": data}

    def _prompt_logprobs(self, entries: Iterable[PromptLogprob] | None) -> Iterator[pb.PromptLogprob]:
        for entry in entries or ():
            yield pb.PromptLogprob(token=None if entry is None else self._logprob(entry))


def usage(admitted: Admitted, completion_tokens: int, cached_tokens: int) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=len(admitted.request.prompt_ids),
        completion_tokens=completion_tokens,
        cached_tokens=cached_tokens,
    )


def model(info: ModelInfo) -> pb.Model:
    return pb.Model(
        name=info.name,
        family=info.family,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        dtype=info.dtype,
        quantization=info.quantization,
    )
