"""Parts that completions and chats share in OpenAI's answers, and the form of a completion."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from ....replicas.text.tokenizer.tokenizer import Tokenizer
from ....replicas.types import Delta, FinishReason, PromptLogprob, WeightsStatus
from ...transport.http_server.response_content import JsonObject
from ..common.collected_response import (
    LARGE_RESPONSE_VALUES,
    CollectedChoice,
    CollectedResponse,
    count_logprob_values,
)
from ..common.parsed_request import AdmittedRequest
from .openai_logprobs import LogprobWriter, TextOffsets


class EchoedPrompt:
    """A prompt that is repeated before its completion.

    added   number of ids at its beginning and its end that the text does not show, since the tokenizer added them.
            None: unknown; then special tokens count as added
    """

    def __init__(
        self,
        text: str,
        ids: Sequence[int],
        logprobs: Sequence[PromptLogprob] | None,
        added: tuple[int, int] | None = (0, 0),
    ) -> None:
        self.text = text
        self.ids = ids
        self.logprobs = logprobs
        self._added = added

    def offsets(self, tokenizer: Tokenizer) -> list[int]:
        """Return where each id begins in the text, in characters."""
        before, behind = self._added or (0, 0)
        own = self.ids[before : len(self.ids) - behind]
        offsets = TextOffsets(tokenizer, skip_special_tokens=self._added is None).push(own)
        return [0] * before + offsets + [len(self.text)] * behind

    @property
    def large(self) -> bool:
        """Whether writing it takes so long that it must not block other streams."""
        return len(self.ids) + count_logprob_values(self.logprobs or ()) >= LARGE_RESPONSE_VALUES


class ChoiceChunks(Protocol):
    """Writer of the chunks of one choice, without its index."""

    def opening(self) -> JsonObject | None: ...

    def delta(self, delta: Delta) -> JsonObject | None:
        """Return the fields of a chunk; None if there are none yet: text may be held back until it is clear what it
        is.
        """
        ...


class ResponseForm(Protocol):
    """Form of an answer: the parts in which completions and chats differ. There is one for each call."""

    prefix: str
    object: str
    chunk_object: str
    fingerprint: str

    def choice(self, choice: CollectedChoice, admitted: AdmittedRequest, echo: EchoedPrompt | None) -> JsonObject: ...

    def stream(self, admitted: AdmittedRequest, echo: EchoedPrompt | None) -> ChoiceChunks: ...

    def beside_choices(self, admitted: AdmittedRequest) -> JsonObject:
        """Return the fields that the answer has once, beside its choices; in a stream, in the first chunk."""
        ...

    def usage_details(self) -> JsonObject:
        """Return further fields of `usage`, once every choice is written."""
        ...


class CompletionForm:
    prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, tokens: LogprobWriter, fingerprint: str, *, token_ids: bool = False) -> None:
        self.fingerprint = fingerprint
        self._tokens = tokens
        self._token_ids = token_ids

    def choice(self, choice: CollectedChoice, admitted: AdmittedRequest, echo: EchoedPrompt | None) -> JsonObject:
        stream = self.stream(admitted, echo)
        begun = stream.opening() or {"text": "", "logprobs": None}
        logprobs = stream.logprobs(choice.token_ids, choice.logprobs)
        if logprobs is not None and begun["logprobs"] is not None:
            logprobs = {name: begun["logprobs"][name] + values for name, values in logprobs.items()}
        ids: JsonObject = {}
        if self._token_ids:
            ids = {"prompt_token_ids": list(admitted.request.prompt_ids), "token_ids": list(choice.token_ids)}
        return {"text": begun["text"] + choice.text, "logprobs": logprobs} | ids | finish_fields(choice)

    def stream(self, admitted: AdmittedRequest, echo: EchoedPrompt | None) -> _CompletionChunks:
        return _CompletionChunks(self._tokens, admitted, echo, token_ids=self._token_ids)

    def beside_choices(self, admitted: AdmittedRequest) -> JsonObject:
        return {}

    def usage_details(self) -> JsonObject:
        return {}


class _CompletionChunks:
    def __init__(
        self, tokens: LogprobWriter, admitted: AdmittedRequest, echo: EchoedPrompt | None, *, token_ids: bool
    ) -> None:
        self._tokens = tokens
        self._admitted = admitted
        self._token_ids = token_ids
        self._prompt_sent = False
        self._echo = echo
        self._offsets: TextOffsets | None = None

    def opening(self) -> JsonObject | None:
        echo = self._echo
        if echo is None:
            return None
        logprobs = None
        if echo.logprobs is not None:
            logprobs = self._tokens.legacy(echo.ids, echo.logprobs, echo.offsets(self._tokens.tokenizer))
        return {"text": echo.text, "logprobs": logprobs, "finish_reason": None}

    def delta(self, delta: Delta) -> JsonObject | None:
        logprobs = self.logprobs(delta.token_ids, delta.logprobs)
        ids = self._ids(delta)
        if not delta.text and logprobs is None and delta.finish_reason is None and not ids:
            return None
        return {"text": delta.text, "logprobs": logprobs} | ids | finish_fields(delta)

    def _ids(self, delta: Delta) -> JsonObject:
        """Return the token ids of a chunk; the first chunk has the prompt's too."""
        if not self._token_ids:
            return {}
        prompt: JsonObject = {} if self._prompt_sent else {"prompt_token_ids": list(self._admitted.request.prompt_ids)}
        self._prompt_sent = True
        return prompt | {"token_ids": list(delta.token_ids)}

    def logprobs(self, ids: Sequence[int], entries: Sequence[PromptLogprob] | None) -> JsonObject | None:
        if entries is None:
            return None
        if self._offsets is None:
            start = 0 if self._echo is None else len(self._echo.text)
            request = self._admitted.request
            self._offsets = TextOffsets(
                self._tokens.tokenizer,
                start=start,
                prompt_ids=request.prompt_ids,
                skip_special_tokens=request.sampling.skip_special_tokens,
            )
        return self._tokens.legacy(ids, entries, self._offsets.push(ids))


def finish_fields(of: Delta | CollectedChoice, *, called: bool = False) -> JsonObject:
    """Return `finish_reason`, and `stop_reason` if there is one. `called`: whether the choice called a tool, as
    AnswerReader reports.
    """
    reason = of.finish_reason
    if called and reason is FinishReason.STOP:
        return {"finish_reason": "tool_calls"}
    ended: dict[str, Any] = {"finish_reason": None if reason is None else str(reason)}
    if of.stop_reason is not None:
        ended["stop_reason"] = of.stop_reason
    return ended


def usage_fields(admitted: Sequence[AdmittedRequest], completion_tokens: int, cached_tokens: int) -> JsonObject:
    prompt_tokens = sum(len(one.request.prompt_ids) for one in admitted)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def weights_fingerprint(form: ResponseForm, weights: Collection[WeightsStatus]) -> str:
    """Return the fingerprint with the versions of the weights that computed an answer, if they have been updated.

    There are several if prompts were computed apart, or a request moved to a replica with other weights. Two of the
    same version belong to two pools.
    """
    versions = sorted(one.version for one in set(weights))
    return form.fingerprint if versions in ([], [0]) else "-".join([form.fingerprint, *map(str, versions)])


def response_head(form: ResponseForm, first: AdmittedRequest, object_name: str) -> JsonObject:
    return {
        "id": form.prefix + first.request.request_id,
        "object": object_name,
        "created": first.created,
        "model": first.model,
        "system_fingerprint": form.fingerprint,
    }


def whole_response(
    form: ResponseForm,
    admitted: Sequence[AdmittedRequest],
    gathered: Sequence[CollectedResponse],
    echoes: Sequence[EchoedPrompt | None],
    keep: int,
) -> JsonObject:
    """Return the whole answer, with the `keep` best choices of each prompt."""
    choices: list[dict[str, Any]] = []
    for one, response, echo in zip(admitted, gathered, echoes, strict=True):
        for choice in best_choices(response.choices, keep):
            choices.append({"index": len(choices)} | form.choice(choice, one, echo))
    tokens = sum(response.completion_tokens for response in gathered)
    cached = sum(response.cached_tokens for response in gathered)
    counted = usage_fields(admitted, tokens, cached) | form.usage_details()
    fingerprint = weights_fingerprint(form, {one for response in gathered for one in response.weights})
    body = {"system_fingerprint": fingerprint, "choices": choices, "usage": counted}
    return response_head(form, admitted[0], form.object) | form.beside_choices(admitted[0]) | body


def best_choices(choices: Sequence[CollectedChoice], keep: int) -> Sequence[CollectedChoice]:
    """Return the choices with the highest log-probability per token, best first; in their order if all are kept."""
    if keep >= len(choices):
        return choices
    return sorted(choices, key=_mean_logprob, reverse=True)[:keep]


def _mean_logprob(choice: CollectedChoice) -> float:
    return choice.logprob / max(len(choice.token_ids), 1)
